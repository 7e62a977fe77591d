"""A weight transport is found by its name or its import path, and a weight sync needs no more."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_opd.config.sections import TRANSPORTS, WeightSyncConfig
from megatron_opd.sim.clock import run_virtual
from megatron_opd.weight_sync.broadcast import BROADCAST
from megatron_opd.weight_sync.disk import DISK
from megatron_opd.weight_sync.session import WeightSync
from megatron_opd.weight_sync.shards import SHARDS
from megatron_opd.weight_sync.transport import FleetPart, TransportKind, transport_kind
from sglang_bridge.protocol import WeightPiece
from tests.support.config_files import minimal
from tests.support.fakes import SameServers

SERVER = "http://a:1"
NOT_A_KIND = object()


class Hearsay:
    """Toy transport: the learner's part answers with the weights, the servers are a dictionary."""

    def __init__(self, fleet, ask, config):
        self.fleet, self.ask, self.config = fleet, ask, config
        self.tensors, self.num_bytes = frozenset(), 0

    async def open(self):
        self.tensors = frozenset((await self.ask(b"names")).decode().split())
        self.num_bytes = 8 * len(self.tensors)

    async def reopen(self):
        await self.open()

    stages = False

    async def stage(self, version):
        raise AssertionError("it stages nothing")

    async def send(self, version):
        for name in sorted(self.tensors):
            self.fleet.held[name] = await self.ask(name.encode())

    async def close(self):
        self.fleet.held.clear()


class HearsayLearner:
    """Its part in the learner. full: values of tensors by name."""

    def __init__(self, full, config):
        self.full = full

    def handle(self, request: bytes) -> bytes:
        name = request.decode()
        return " ".join(self.full).encode() if name == "names" else self.full[name]

    def close(self) -> None:
        self.full.clear()


HEARSAY = TransportKind(Hearsay, HearsayLearner)


class Servers(SameServers):
    """What every weight sync asks of the servers."""

    silent = ()
    urls = (SERVER,)

    def __init__(self):
        self.log: list[str] = []
        self.held: dict[str, bytes] = {}
        self.version = 0

    async def versions(self):
        return {SERVER: self.version}

    async def pause(self, mode="retract"):
        self.log.append("pause")

    async def resume(self):
        self.log.append("resume")

    async def flush_cache(self):
        self.log.append(f"flush {sorted(self.held)}")

    async def begin_weight_update(self):
        self.log.append("begin")

    async def end_weight_update(self, version):
        self.version = version

    async def abort_all(self):
        raise NotImplementedError

    async def abandon_weight_update(self, limit_s):
        return {}

    async def weight_digests(self, *, staged=False):
        return {
            SERVER: [
                WeightPiece(0, name, 0, 0, 1, "float32", value.hex())
                for name, value in self.held.items()
            ]
        }


class Learner:
    """The learner's end of the connection, with its part of the transport."""

    def __init__(self, part):
        self.part = part

    async def move_weights(self, payload: bytes) -> bytes:
        return self.part.handle(payload)

    async def piece_digests(self, pieces: Sequence[WeightPiece]):
        return [self.part.full[piece.hf_name].hex() for piece in pieces]


def test_a_transport_from_outside_the_package_serves_a_whole_weight_sync():
    config = minimal(weight_sync={"type": f"{__name__}:HEARSAY"})
    kind = transport_kind(config.weight_sync)
    weights = {"embed": b"one", "norm": b"two"}
    servers, learner = Servers(), Learner(kind.learner_part(dict(weights), config))
    transport: FleetPart = kind.fleet_part(servers, learner.move_weights, config)
    weight_sync = WeightSync(servers, learner, transport, config.weight_sync)

    async def scenario():
        await weight_sync.open()
        report = await weight_sync.sync(3)
        assert servers.held == weights
        assert (report.version, report.num_bytes) == (3, 16)
        assert "verify" in report.phase_seconds()
        await weight_sync.close()
        assert servers.held == {}

    run_virtual(scenario())
    assert servers.log == ["pause", "begin", "flush ['embed', 'norm']", "resume"]


def test_every_named_transport_is_there_and_shards_is_the_default():
    kinds = {
        name: transport_kind(
            WeightSyncConfig(type=name, directory=Path("w") if name == "disk" else None)
        )
        for name in TRANSPORTS
    }
    assert kinds == {"shards": SHARDS, "broadcast": BROADCAST, "disk": DISK}
    assert transport_kind(WeightSyncConfig()) is SHARDS


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:KIND", "weight_sync.type: module no_such_module of .* cannot be imported"),
        (f"{__name__}:MISSING", f"weight_sync.type: module {__name__} has no MISSING"),
        (f"{__name__}:NOT_A_KIND", "weight_sync.type: .* must be a .*:TransportKind, got object"),
    ],
)
def test_a_path_that_names_no_transport_is_refused_in_one_line(path: str, message: str):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        transport_kind(WeightSyncConfig(type=path))
    assert "\n" not in str(error.value)


def test_a_name_that_is_neither_is_refused_with_the_configuration():
    with pytest.raises(
        ValueError, match="must be one of shards, broadcast, disk or your own as MODULE:NAME"
    ):
        WeightSyncConfig(type="carrier-pigeon")
