"""Plans a whole weight sync from what is known before anything runs. Torch-free.

Learner ranks and controller make the same plan, each for itself, from config.json, the learner's
layout and the servers' layouts. Nobody needs to send it to the learner; the servers get their part.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.spec import ModelSpec
from megatron_opd.weight_sync.holdings import Held, learner_holdings, server_holdings
from megatron_opd.weight_sync.reshard import plan_routes
from megatron_opd.weight_sync.schedule import Bucket, Schedule, ServerGroup
from sglang_bridge import wire


@dataclass(frozen=True, slots=True, order=True)
class ServerLayout:
    """Describes how one server is cut: tp ranks, ep of which split the experts."""

    tp: int
    ep: int


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """Says who sends what to whom: before the pause to shadow buffers, and in the pause."""

    staged: Schedule
    paused: Schedule


def plan_sync(
    spec: ModelSpec,
    parallel: ParallelConfig,
    fields: Mapping[str, Any],
    servers: Sequence[ServerLayout],
    max_elements_of_bucket: int,
    max_elements_staged: float,
) -> SyncPlan:
    """Plan a weight sync to `servers`, in their order.

    fields: learner.megatron. max_elements_staged: numbers that a server rank has room to stage.
    CannotReshard: the learner does not hold what the servers want.
    """
    learner = list(learner_holdings(spec, parallel, fields))
    firsts = first_receivers(servers)
    staged: list[ServerGroup] = []
    paused: list[ServerGroup] = []
    for layout in sorted(set(servers)):
        held = list(server_holdings(spec, layout.tp, layout.ep))
        routes = plan_routes(learner, held)
        names = staged_names(held, max_elements_staged)
        places = tuple(
            first for first, other in zip(firsts, servers, strict=False) if other == layout
        )
        for groups, chosen in ((staged, True), (paused, False)):
            kept = tuple(route for route in routes if (route.name in names) is chosen)
            groups.append(ServerGroup(kept, places))
    limit = max_elements_of_bucket
    return SyncPlan(Schedule(staged, firsts[-1], limit), Schedule(paused, firsts[-1], limit))


def staged_names(held: Iterable[Held], max_elements: float) -> frozenset[str]:
    """Return the tensors that are staged: as many, from the first, as every rank has room for."""
    shares: dict[str, Counter[int]] = defaultdict(Counter)
    for part in held:
        for rank in part.ranks:
            shares[part.name][rank] += part.length * (math.prod(part.shape) // part.shape[part.dim])
    taken: Counter[int] = Counter()
    names: list[str] = []
    for name, share in shares.items():
        taken.update(share)
        if max(taken.values()) > max_elements:
            break
        names.append(name)
    return frozenset(names)


def first_receivers(servers: Sequence[ServerLayout]) -> list[int]:
    """Return where each server's ranks start among those of all servers, and their number."""
    return list(accumulate((server.tp for server in servers), initial=0))


def server_share(plan: SyncPlan, first: int, tp: int) -> str:
    """Return what the `tp` ranks of a server receive, as JSON, see sglang_bridge.wire.

    first: the first of its ranks among those of all servers.
    """
    shares = [
        {
            wire.STAGED: _listed(plan.staged.incoming(receiver)),
            wire.PAUSED: _listed(plan.paused.incoming(receiver)),
        }
        for receiver in range(first, first + tp)
    ]
    return json.dumps(shares, separators=(",", ":"))


def _listed(buckets: Sequence[Bucket]) -> list[Any]:
    return [[b.source, [[p.name, p.dim, p.start, p.length] for p in b.parts]] for b in buckets]
