"""What the ranks of a learner do in tests of weight syncs from shard to shard."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_opd.checkpoint.convert import load_weights, source_of
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.schema import Config
from megatron_opd.learner.devices import cpu
from megatron_opd.learner.model import build_model
from megatron_opd.learner.world import World, init_world
from megatron_opd.models.gather import FullTensors
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.sizing.learner import weight_bytes
from megatron_opd.weight_sync.digests import piece_digests
from megatron_opd.weight_sync.holdings import as_held, learner_holdings, server_holdings
from megatron_opd.weight_sync.plan import ServerLayout
from megatron_opd.weight_sync.reshard import bytes_passed_on, bytes_sent, plan_routes
from megatron_opd.weight_sync.rounding import rounded
from megatron_opd.weight_sync.shards import Shards
from megatron_opd.weight_sync.shards_sender import ShardsSender
from megatron_opd.weight_sync.transport import LearnerPart
from sglang_bridge import wire
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.protocol import WeightPiece
from sglang_bridge.weights import message_order
from sglang_bridge.weights.formats import Format, Grid, item_bytes
from sglang_bridge.weights.lanes import DESCRIPTOR_BYTES
from tests.support.quantised import held_oracle, is_kept
from tests.support.receiving import LosingFleet, ThreadFleet, staged_digests_of

BUCKET_BYTES = 30_000
ALONE = 600  # numbers of a part that travels alone, of the tiny models' tensors about half
STEP = 1.25  # what weights are multiplied by between two weight syncs: exact in binary


Ask = Callable[[Any], Awaitable[Any]]


@dataclass(frozen=True)
class Fleet:
    """Servers that weights of a model are sent to. servers: (tp, ep) of each.

    round_to: what their values are rounded to. quantization: how they hold matrices. staging_bytes:
    what a rank stages; 0: nothing. relay: whether they pass weights on to each other.
    """

    model: str
    servers: tuple[tuple[int, int], ...]
    dtype: str
    round_to: Grid | None = None
    quantization: Format | None = None
    staging_bytes: int = 0
    relay: bool = False


def shards_to_fleets(
    out: Path,
    *,
    models: dict[str, Path],
    parallel: dict[str, int],
    fleets: list[Fleet],
    same_host: str,
) -> None:
    """Sends every model's weights, as they are and after a change, to all its fleets."""
    configs = {f: config_of(models[f.model], parallel, f, same_host=same_host) for f in fleets}
    message_order.ALONE = ALONE
    serve_fleets(models, configs, ShardsSender, _control)


def serve_fleets(
    models: dict[str, Path],
    configs: dict[Fleet, Config],
    part_of: Callable[[FullTensors, Config], LearnerPart],
    control: Callable[..., Awaitable[None]],
) -> None:
    """Serves every fleet in turn, with the weights of each model loaded once."""
    learner = next(iter(configs.values())).learner
    with cpu.install():
        world = init_world(learner.parallel, 1, 1, 60.0)
        for name in dict.fromkeys(fleet.model for fleet in configs):
            full = loaded(models[name], world, learner)
            for fleet, config in configs.items():
                if fleet.model == name:
                    told = partial(control, config=config, fleet=fleet)
                    serve(full, part_of(full, config), told, fleet)
    dist.destroy_process_group()


def shards_without_a_lost_server(
    out: Path, *, model: Path, parallel: dict[str, int], fleet: Fleet, same_host: str
) -> None:
    """Sends to servers, of which one is lost while it receives, and then to the others."""
    # whoever waited for a timeout would wait for more than a minute
    config = config_of(model, parallel, fleet, timeout_s=300.0, same_host=same_host)
    message_order.ALONE = ALONE
    with cpu.install():
        world = init_world(config.learner.parallel, 1, 1, 60.0)
        full = loaded(model, world, config.learner)
        serve(full, ShardsSender(full, config), partial(_lose, config=config, fleet=fleet), fleet)
    dist.destroy_process_group()


def loaded(model: Path, world: World, learner: LearnerConfig) -> FullTensors:
    """A checkpoint's weights as the ranks of `world` hold them."""
    spec = read_model_spec(model)
    chunks = [wrapped.module for wrapped in build_model(spec, world, learner)]
    load_weights(chunks, spec, world, source_of(model, spec, None))
    return FullTensors(chunks, spec, world)


def config_of(model: Path, parallel: dict[str, int], fleet: Fleet, **transport: object) -> Config:
    """What learner and controller are configured with."""
    server = {"model": str(model), "dtype": fleet.dtype}
    return Config.model_validate(
        {
            "data": {"train": "unused"},
            "student": server | {"quantization": fleet.quantization},
            "teacher": server,
            "learner": {"dtype": "float32", "threads": 1, "parallel": parallel},
            "weight_sync": {
                "bucket_bytes": BUCKET_BYTES,
                "timeout_s": 30.0,
                "round_to": fleet.round_to,
                "staging": fleet.staging_bytes > 0,
                "staging_bytes": fleet.staging_bytes or None,
                "relay": fleet.relay,
                **transport,
            },
        }
    )


def serve(
    full: FullTensors,
    part: LearnerPart,
    control: Callable[[Ask, FullTensors], Awaitable[None]],
    fleet: Fleet,
) -> None:
    """Executes what `control`, in a thread of rank 0, asks of all ranks."""
    asked: Queue[Any] = Queue()
    answers: Queue[Any] = Queue()
    failed: list[BaseException] = []

    async def ask(request: Any) -> Any:
        asked.put(request)
        return await asyncio.to_thread(answers.get, timeout=60)

    async def steer() -> None:
        await control(ask, full)

    def run() -> None:
        try:
            asyncio.run(steer())
        except BaseException as error:  # noqa: BLE001  raised below
            failed.append(error)
        finally:
            asked.put(None)

    controller = threading.Thread(target=run)
    if full.world.rank == 0:
        controller.start()
    while True:
        box = [asked.get() if full.world.rank == 0 else None]
        dist.broadcast_object_list(box)
        if box[0] is None:
            break
        answers.put(_handle(box[0], part, full, fleet))
    if full.world.rank == 0:
        controller.join()
    part.close()
    if failed:
        raise failed[0]


def _handle(request: Any, part: LearnerPart, full: FullTensors, fleet: Fleet) -> Any:
    match request:
        case bytes():
            return part.handle(request)
        case "export":
            return {name: tensor.clone() for name, tensor in full.tensors()}
        case "step":
            with torch.no_grad():
                for shard in full.shards.values():
                    shard.parameter.mul_(STEP)
        case "train":
            for _ in range(20):  # beside what is sent: also messages in the learner's own group
                dist.all_reduce(torch.ones(1000))
                with torch.no_grad():
                    for shard in full.shards.values():
                        shard.parameter.mul_(STEP)
        case "small step":
            with torch.no_grad():  # the same numbers on all ranks that hold them
                for shard in full.shards.values():
                    shard.parameter[:1].mul_(STEP)
        case pieces:
            return piece_digests(
                part.source, pieces, fleet.round_to, fleet.quantization, fleet.dtype
            )


async def _control(ask: Ask, full: FullTensors, *, config: Config, fleet: Fleet) -> None:
    layouts = [ServerLayout(*s) for s in fleet.servers]
    servers = ThreadFleet(full.spec, layouts, fleet.dtype, fleet.quantization)
    shards = Shards(servers, ask, config)
    await shards.open()
    assert shards.num_bytes == max(rank.num_bytes for rank in servers.ranks())
    for version in (1, 2):
        for rank in servers.ranks():
            assert rank.group is not None
            rank.group.clear()
        if shards.stages:
            await shards.stage(version)
            await _require_staged(servers, ask, fleet)
        await shards.send(version)
        exported = await ask("export")
        wanted = wanted_of(exported, fleet)
        assert shards.tensors == wanted.keys(), shards.tensors ^ wanted.keys()
        _require_received(servers, wanted, fleet, config)
        if not _on_one_host(config):
            _require_sent(servers, full.spec, config, fleet)
        await ask("step") if version == 1 else None
    pieces = [p for found in servers.described(digests=True).values() for p in found]
    assert await ask(pieces) == [piece.digest for piece in pieces], "digests"
    await shards.close()


async def _lose(ask: Ask, full: FullTensors, *, config: Config, fleet: Fleet) -> None:
    servers = LosingFleet(full.spec, [ServerLayout(*s) for s in fleet.servers], fleet.dtype)
    servers.victim = 1 if fleet.relay else 0
    lost = servers.lost_url
    shards = Shards(servers, ask, config)
    await shards.open()
    await _received(shards, 1)
    servers.losing = True
    began = time.monotonic()
    # the others know only whom they have lost, be it one that was left itself
    said = f"^{lost}: no answer; " if fleet.relay else f"^{lost} rank 0 did not take its weights: "
    with pytest.raises(WeightSyncFailed, match=said) as told:
        await _received(shards, 2)
    assert told.value.servers == ({lost} if fleet.relay else frozenset())
    assert time.monotonic() - began < 20.0, "somebody waited for a timeout"
    servers.drop_lost()
    await ask("step")
    await shards.reopen()
    await _received(shards, 2)
    require_held(servers, wanted_of(await ask("export"), fleet), fleet)
    await shards.close()


def shards_beside_training(
    out: Path, *, models: dict[str, Path], parallel: dict[str, int], fleets: list[Fleet]
) -> None:
    """Sends versions while the learner makes the next ones; of two servers one is lost then."""
    message_order.ALONE = ALONE
    with cpu.install():
        configs = {f: config_of(models[f.model], parallel, f, overlap=True) for f in fleets}
        learner = configs[fleets[0]].learner
        world = init_world(learner.parallel, 1, 1, 60.0)
        for fleet in fleets:
            full = loaded(models[fleet.model], world, learner)
            part = ShardsSender(full, configs[fleet])
            copied = sum(s.parameter.nbytes for s in part.source.shards.values())
            assert copied == weight_bytes(full.spec, learner), "what opd check says"
            serve(full, part, partial(_overlap, config=configs[fleet], fleet=fleet), fleet)
    dist.destroy_process_group()


async def _overlap(ask: Ask, full: FullTensors, *, config: Config, fleet: Fleet) -> None:
    layouts = [ServerLayout(*server) for server in fleet.servers]
    servers = LosingFleet(full.spec, layouts, fleet.dtype, fleet.quantization)
    shards = Shards(servers, ask, config)
    await shards.open()
    for version in (1, 2):
        wanted = wanted_of(await ask("export"), fleet)
        training = await _started(shards, version, ask)
        await _received(shards, version)
        require_held(servers, wanted, fleet)
        await training
        pieces = [p for found in servers.described(digests=True).values() for p in found]
        assert await ask(pieces) == [p.digest for p in pieces], "digests are of what was sent"
    wanted = wanted_of(await ask("export"), fleet)
    training = await _started(shards, 3, ask)
    servers.losing = True
    with pytest.raises(WeightSyncFailed):
        await _received(shards, 3)
    await training
    servers.drop_lost()
    await shards.reopen()
    await shards.start(3, None)  # the learner has made another version since
    await _received(shards, 3)
    require_held(servers, wanted, fleet)
    await shards.close()


async def _received(shards: Shards, version: int) -> None:
    if shards.stages:
        await shards.stage(version)
    await shards.send(version)


async def _started(shards: Shards, version: int, ask: Ask) -> asyncio.Task[Any]:
    """Begin to send a version; returns the update that begins as soon as it may, and has moved."""
    released: list[asyncio.Task[Any]] = []
    await shards.start(version, lambda: released.append(asyncio.create_task(ask("train"))))
    (training,) = released
    await asyncio.sleep(0.05)  # nothing is received yet: what is sent live is no version's
    return training


async def _require_staged(
    servers: ThreadFleet, ask: Callable[[Any], Awaitable[Any]], fleet: Fleet
) -> None:
    """Shadow buffers hold the learner's weights, as many as fit; live memory is as before."""
    before = servers.described(digests=True)
    staged = [
        WeightPiece(0, name, int(dim), int(start), int(length), dtype, digest)
        for rank in servers.ranks()
        for key, digest in staged_digests_of(rank.receiver).items()
        for name, dim, start, length, dtype in [key.split(wire.PIECE_SEPARATOR)]
    ]
    assert staged
    assert await ask(staged) == [piece.digest for piece in staged], "staged digests"
    assert servers.described(digests=True) == before
    for rank in servers.ranks():
        assert rank.group is not None
        assert sum(rank.group.sizes) <= fleet.staging_bytes or rank.same_host.openers


def wanted_of(exported: dict[str, torch.Tensor], fleet: Fleet) -> dict[str, torch.Tensor]:
    """What servers are to hold of the export, whole."""
    if fleet.quantization is not None:
        held = held_oracle(exported, fleet.quantization, getattr(torch, fleet.dtype))
        # of what is not quantised each rank says in which dtype it holds it
        return held | {name: tensor for name, tensor in exported.items() if is_kept(name)}
    return {name: rounded(name, tensor, fleet.round_to) for name, tensor in exported.items()}


def _require_received(
    servers: ThreadFleet, wanted: dict[str, torch.Tensor], fleet: Fleet, config: Config
) -> None:
    """Every rank holds its slices of what it is to hold, bit for bit; nothing came besides."""
    require_held(servers, wanted, fleet)
    learners = set(range(config.learner.parallel.world_size))
    for index, rank in enumerate(servers.ranks()):
        assert rank.group is not None
        if _on_one_host(config):
            assert set(rank.same_host.openers) == learners
            assert set(rank.group.sizes) == {DESCRIPTOR_BYTES}, "numbers passed through the group"
            continue
        assert not rank.same_host.openers
        assert sum(rank.group.sizes) == rank.num_bytes, (fleet, index)
        assert max(rank.group.sizes) <= BUCKET_BYTES
        assert fleet.quantization is not None or rank.num_bytes > BUCKET_BYTES


def _on_one_host(config: Config) -> bool:
    return config.weight_sync.same_host == "auto" and not config.weight_sync.relay


def _require_sent(servers: ThreadFleet, spec: ModelSpec, config: Config, fleet: Fleet) -> None:
    """Every rank of learner and servers sent as many bytes as planned; opd check plans the same."""
    learner, sizes = config.learner, item_bytes(fleet.dtype)
    by_rank: Counter[int] = Counter()
    passed_on: Counter[tuple[int, int]] = Counter()
    for rank in servers.ranks():
        assert rank.group is not None
        by_rank += Counter(
            {p: n for p, n in rank.group.received.items() if p < learner.parallel.world_size}
        )
    for server, ranks in enumerate(servers.servers):
        for index, rank in enumerate(ranks):
            assert rank.group is not None
            passed_on[server, index] = rank.group.sent.total()
    holdings = learner_holdings(spec, learner.parallel, learner.megatron)
    held = list(as_held(holdings, fleet.quantization))
    wanted: Counter[int] = Counter()
    for layout in set(fleet.servers):
        at = [server for server, other in enumerate(fleet.servers) if other == layout]
        routes = plan_routes(held, as_held(server_holdings(spec, *layout), fleet.quantization))
        wanted += bytes_sent(routes, len(at), sizes, relays=fleet.relay)
        for place, server in enumerate(at):
            left = len(at) - place if fleet.relay else 1
            planned = bytes_passed_on(routes, left, sizes)
            for index in range(layout[0]):
                assert passed_on[server, index] == planned[index], (fleet, server, index)
    assert by_rank == wanted, fleet


def require_held(servers: ThreadFleet, wanted: dict[str, torch.Tensor], fleet: Fleet) -> None:
    """Every rank holds its slices of `wanted`, bit for bit, and no memory beside was written."""
    for index, rank in enumerate(servers.ranks()):
        for piece, canvas in zip(rank.pieces, rank.canvases, strict=True):
            whole = wanted[piece.hf_name].to(piece.view.dtype)
            part = whole.narrow(piece.dim, piece.start, piece.length)
            same = torch.equal(_bits(piece.view), _bits(part))
            assert same, (fleet, index, piece.hf_name)
            filled = canvas > -128 if canvas.dtype == torch.int8 else canvas.float().isfinite()
            assert int(filled.sum()) == part.numel(), "memory beside it was written"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """What lies in memory: also the sign of a zero."""
    return tensor.contiguous().view(torch.uint8)
