"""The controller's part of the disk transport: what it asks of whom, and after a failure."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.weight_sync.disk import Disk
from megatron_opd.weight_sync.disk_messages import DiskRefused, Open, Write, Written, decode, encode
from megatron_opd.weight_sync.holdings import server_holdings
from megatron_opd.weight_sync.plan import ServerLayout
from megatron_opd.weight_sync.quantised_pieces import CannotServe
from sglang_bridge import wire
from sglang_bridge.errors import RankFailed, WeightSyncFailed
from sglang_bridge.protocol import ServerInfo, WeightPiece
from tests.support.config_files import minimal

LAYOUTS = (ServerLayout(2, 2), ServerLayout(1, 1))


class Sides:
    """Learner and servers on one log; what they are asked to refuse they refuse once."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.log: list[Any] = []
        self.fails: dict[str, str] = {}
        self.pending = 0
        self.infos = [
            ServerInfo(f"http://s{i}:1", "", 1, 1, at.tp, at.ep, 0, "", 1, deterministic=False)
            for i, at in enumerate(LAYOUTS)
        ]

    async def weight_pieces(self) -> dict[str, list[WeightPiece]]:
        return {
            info.url: [
                WeightPiece(rank, held.name, held.dim, held.start, held.length, "bfloat16", "")
                for held in server_holdings(self.spec, info.tp_size, info.ep_size)
                for rank in held.ranks
            ]
            for info in self.infos
        }

    async def ask(self, request: bytes) -> bytes:
        message = decode(request)
        self.log.append(message)
        cause = self.fails.pop("learner", None)
        return encode(DiskRefused(cause) if cause else Written(99))

    async def ask_ranks(self, action: str, timeout_s: float | None = None) -> dict[str, Any]:
        verb, _, argument = action.partition(" ")
        self.log.append((verb, argument))
        if verb in self.fails:
            raise RankFailed(self.fails.pop(verb))
        answer: dict[str, str] = {}
        if verb == wire.STAGED_VERSION and self.pending:
            self.pending -= 1
            answer = {wire.PENDING: ""}
        ranks = [{wire.RECEIVED_BYTES: str(n), **answer} for n in (3, 7)]
        return {info.url: ranks[: info.tp_size] for info in self.infos}

    def asked(self) -> list[str]:
        """The kinds of what was asked, in order."""
        return [each[0] if isinstance(each, tuple) else type(each).__name__ for each in self.log]

    def writes(self) -> list[Write]:
        return [each for each in self.log if isinstance(each, Write)]


def disk_of(moe: Path, sides: Any, **settings: object) -> Disk:
    sync = {"type": "disk", "directory": "/shared/weights", **settings}
    config = minimal(student={"model": str(moe)}, weight_sync=sync)
    return Disk(sides, sides.ask, config)


@pytest.fixture
def sides(moe: Path) -> Sides:
    return Sides(read_model_spec(moe))


async def rounds(disk: Disk, versions: Sequence[int]) -> None:
    for version in versions:
        await disk.stage(version)
        await disk.send(version)


def test_versions_are_written_before_the_pause_and_named_to_the_servers(moe: Path, sides: Sides):
    disk = disk_of(moe, sides)

    async def run() -> None:
        await disk.open()
        whole = disk.num_bytes
        assert whole == 2 * sum(held.elements for held in server_holdings(sides.spec, 1, 1))
        await rounds(disk, (0, 5))
        assert disk.num_bytes == 7
        await disk.close()

    asyncio.run(run())
    assert disk.stages
    assert disk.tensors == {held.name for held in server_holdings(sides.spec, 1, 1)}
    take, close = wire.TAKE_VERSION, wire.CLOSE_VERSIONS
    assert sides.asked() == ["Open", wire.OPEN_VERSIONS, "Write", take, "Write", take, close]
    opened = sides.log[0]
    assert isinstance(opened, Open)
    assert opened.dtype == "bfloat16"
    assert opened.owner.endswith("runs/run")
    place = json.loads(sides.log[1][1])
    assert place["stream"] == opened.stream
    assert place["staged"] == []
    first, second = (f"00000{i}-version-{v}" for i, v in ((0, 0), (1, 5)))
    assert sides.writes() == [Write(first, 0, True, None), Write(second, 5, False, first)]
    assert (take, first) in sides.log
    assert (take, second) in sides.log


@pytest.mark.parametrize("room", [None, 80_000])
def test_staged_versions_are_read_before_the_pause(moe: Path, sides: Sides, room: int | None):
    disk = disk_of(moe, sides, staging=True, staging_bytes=room)
    sides.pending = 3

    async def run() -> None:
        await disk.open()
        await rounds(disk, [1])

    asyncio.run(run())
    assert sides.asked() == [
        "Open",
        wire.OPEN_VERSIONS,
        "Write",
        wire.STAGE_VERSION,
        *[wire.STAGED_VERSION] * 4,
        wire.TAKE_VERSION,
    ]
    staged = json.loads(sides.log[1][1])["staged"]
    assert (staged is None) == (room is None)
    if room is not None:
        sizes = {held.name: 2 * held.elements for held in server_holdings(sides.spec, 1, 1)}
        assert 0 < sum(sizes[name] for name in staged) <= room


@pytest.mark.parametrize(
    "where", ["learner", wire.STAGE_VERSION, wire.STAGED_VERSION, wire.TAKE_VERSION]
)
def test_after_a_failure_the_next_version_is_whole_and_nothing_is_deleted(
    moe: Path, sides: Sides, where: str
):
    disk = disk_of(moe, sides, staging=True, delta=True)

    async def run() -> None:
        await disk.open()
        await rounds(disk, (1, 2))
        sides.fails[where] = "http://s0:1 rank 1: it cannot"
        with pytest.raises((WeightSyncFailed, RankFailed), match="rank 1: it cannot"):
            await rounds(disk, [3])
        await rounds(disk, (3, 4))

    asyncio.run(run())
    taken = "000001-version-2"
    failed, again, after = sides.writes()[2:]
    assert (failed.whole, failed.taken) == (False, taken)
    assert (again.name, again.version, again.taken) == ("000003-version-3", 3, taken)
    assert again.whole or where == "learner"  # which by itself writes a whole one
    assert (after.whole, after.taken) == (False, again.name)


def test_a_send_without_a_stage_writes(moe: Path, sides: Sides):
    disk = disk_of(moe, sides)

    async def run() -> None:
        await disk.open()
        await disk.send(1)
        await disk.send(1)

    asyncio.run(run())
    assert [write.name for write in sides.writes()] == ["000000-version-1", "000001-version-1"]


def test_what_learner_or_servers_refuse_is_told(moe: Path, sides: Sides):
    sides.fails["learner"] = "/shared/weights: permission denied"
    with pytest.raises(
        WeightSyncFailed, match=r"^the learner: /shared/weights: permission denied$"
    ):
        asyncio.run(disk_of(moe, sides).open())
    assert sides.asked() == ["Open"]
    sides.fails[wire.OPEN_VERSIONS] = "http://s1:1 rank 0: BadVersion: not there"
    with pytest.raises(RankFailed, match="not there"):
        asyncio.run(disk_of(moe, sides).open())


def test_a_server_that_is_cut_otherwise_is_refused_as_by_shards(moe: Path, sides: Sides):
    sides.infos = sides.infos[:1]
    pieces = asyncio.run(sides.weight_pieces())

    async def fewer() -> dict[str, list[WeightPiece]]:
        return {url: found[1:] for url, found in pieces.items()}

    sides.weight_pieces = fewer
    with pytest.raises(CannotServe, match=r"should hold .*use weight_sync.type: broadcast"):
        asyncio.run(disk_of(moe, sides).open())
    assert sides.log == []


def test_every_run_has_a_directory_of_its_own(moe: Path, sides: Sides):
    names = {disk_of(moe, sides)._stream for _ in range(20)}
    assert len(names) == 20
