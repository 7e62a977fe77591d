"""Every way of a weight sync to one server of two ranks, and what it then scores.

SGLang computes with copies of some weights, which no digest sees, and a rank may hold several parts
of a tensor: log-probs are compared, bit for bit with those of the same weights as loaded.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from megatron_opd.models.spec import read_model_spec
from megatron_opd.models.tensors import expected_tensors
from megatron_opd.weight_sync.broadcast_sender import plan_buckets
from megatron_opd.weight_sync.disk import Disk
from megatron_opd.weight_sync.disk_writer import DiskWriter
from megatron_opd.weight_sync.holdings import server_holdings
from megatron_opd.weight_sync.plan import ServerLayout
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from sglang_bridge.server.launch import ServerProcess
from sglang_bridge.weights.exchange import send
from tests.e2e.disk import DiskLearner, relabel
from tests.e2e.replies import expected_scores, ragged_request
from tests.e2e.weight_sync import differing, join, load_tensors, perturbed_copy, plan_for, shards_of
from tests.support.config_files import minimal
from tests.support.oracles import load_reference

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
RANKS = ServerLayout(2, 1)
REQUESTS = [ragged_request(f"l{i}", 30 + i, 40, seed=i) for i in range(3)]


@dataclass(frozen=True)
class Synced:
    """How scores of a server differ, nats. nats: from transformers', of both weights as loaded and
    as first synced. moved: between the two weights. by_way: from those of the same weights before.
    """

    nats: float
    moved: float
    by_way: dict[str, float]


async def scores(client: Fleet) -> list[np.ndarray]:
    """One after another: what is batched beside a request changes its last bits."""
    return [(await client.score(request)).logp_N for request in REQUESTS]


async def by_shards(fleet: Fleet, model: Path, tensors: Tensors, staged: float) -> None:
    """Sync version 1 from one rank; staged: bytes that come before the pause."""
    plan = plan_for(model, RANKS, staged)
    first, rest = (shards_of(plan, tensors, staged=before) for before in (True, False))
    group, name = await join(fleet)
    await fleet.expect_weights(plan.shares(fleet.urls))
    if first:
        await fleet.stage_weights(name)
        await asyncio.to_thread(send, group, first, CPU)
    await fleet.pause("retract")
    await fleet.begin_weight_update()
    await asyncio.gather(fleet.receive_weights(name, 60), asyncio.to_thread(send, group, rest, CPU))
    await fleet.flush_cache()
    await fleet.end_weight_update(1)
    await fleet.resume()
    await fleet.destroy_weights_group(name)
    distributed.destroy_process_group(group)


async def by_broadcast(fleet: Fleet, model: Path, tensors: Tensors) -> None:
    """Sync version 1 in buckets as a learner plans them, of some tensors each."""
    shapes = expected_tensors(read_model_spec(model))
    buckets = plan_buckets([(*each, torch.float32) for each in shapes.items()], 20_000)
    group, name = await join(fleet)
    await fleet.pause("retract")
    await fleet.begin_weight_update()
    for bucket in buckets:
        flat = torch.cat([tensors[n].flatten().view(torch.uint8) for n in bucket.names])
        await asyncio.gather(
            fleet.update_bucket(bucket, name),
            asyncio.to_thread(distributed.broadcast, flat, 0, group),
        )
    await fleet.flush_cache()
    await fleet.end_weight_update(1)
    await fleet.resume()
    await fleet.destroy_weights_group(name)
    distributed.destroy_process_group(group)


async def by_disk(
    fleet: Fleet, model: Path, tensors: Tensors, weights: Path, staging: bool
) -> None:
    """Sync one version by files that the server reads."""
    sync = {"type": "disk", "directory": str(weights), "staging": staging}
    config = minimal(student={"model": str(model)}, weight_sync=sync)
    with pytest.MonkeyPatch.context() as patch:
        learner = DiskLearner(patch, model, tensors)
        await relabel(fleet, 0)
        writer = DiskWriter(learner.full, config)
        session = WeightSync(
            fleet, learner, Disk(fleet, learner.asks(writer), config), config.weight_sync
        )
        await session.open()
        await session.sync(1)
        await session.close()
        writer.close()


def every_way(server: ServerProcess, model: Path, base: Path) -> Synced:
    """Sync to other weights and back, by every transport.

    AssertionError: the server holds other pieces than planned, or other numbers than were sent.
    """
    changed = perturbed_copy(model, base / "changed", scale=0.3, seed=5)
    loaded, other = load_tensors(model), load_tensors(changed)
    weights, url = Path(str(server.spec.weights_dir)), server.spec.url
    ways: list[tuple[str, Tensors, Callable[[Fleet, Tensors], Awaitable[None]]]] = [
        ("shards", other, lambda fleet, to: by_shards(fleet, model, to, 0)),
        ("broadcast", loaded, lambda fleet, to: by_broadcast(fleet, model, to)),
        ("staged shards", other, lambda fleet, to: by_shards(fleet, model, to, 60_000)),
        ("disk", loaded, lambda fleet, to: by_disk(fleet, model, to, weights, False)),
        ("staged disk", other, lambda fleet, to: by_disk(fleet, model, to, weights, True)),
    ]

    async def run() -> list[list[np.ndarray]]:
        async with Fleet([ServerClient(url, timeout_s=120)]) as fleet:
            held = {(p.rank, p.hf_name, p.dim, p.start, p.length) for p in await pieces(fleet)}
            planned = server_holdings(read_model_spec(model), RANKS.tp, RANKS.ep)
            assert held == {
                (rank, part.name, part.dim, part.start, part.length)
                for part in planned
                for rank in part.ranks
            }
            found = [await scores(fleet)]
            for name, tensors, sync in ways:
                await sync(fleet, tensors)
                assert differing(await pieces(fleet, digests=True), tensors) == [], name
                found.append(await scores(fleet))
            return found

    async def pieces(fleet: Fleet, *, digests: bool = False) -> Any:
        return (await (fleet.weight_digests() if digests else fleet.weight_pieces()))[url]

    found = asyncio.run(run())
    nats = 0.0
    for path, logp in ((model, found[0]), (changed, found[1])):
        reference = load_reference(path)
        exact = [expected_scores(reference, request) for request in REQUESTS]
        nats = max(nats, furthest(logp, exact))
    by_way = {
        name: furthest(mine, found[1] if tensors is other else found[0])
        for (name, tensors, _), mine in zip(ways, found[1:], strict=True)
    }
    return Synced(nats, furthest(found[0], found[1]), by_way)


def furthest(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest difference of scores; NaN where one is no number."""
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
