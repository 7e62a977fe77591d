"""Plans a whole weight sync from what is known before anything runs. Torch-free.

Learner ranks and controller make the same plan, each for itself, from config.json, the learner's
layout and the servers' layouts. Nobody needs to send it to the learner; the servers get their part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.spec import ModelSpec
from megatron_opd.weight_sync.holdings import learner_holdings, server_holdings
from megatron_opd.weight_sync.reshard import plan_routes
from megatron_opd.weight_sync.schedule import Schedule, ServerGroup


@dataclass(frozen=True, slots=True, order=True)
class ServerLayout:
    """Describes how one server is cut: tp ranks, ep of which split the experts."""

    tp: int
    ep: int


def plan_sync(
    spec: ModelSpec,
    parallel: ParallelConfig,
    fields: Mapping[str, Any],
    servers: Sequence[ServerLayout],
    max_elements_of_bucket: int,
) -> Schedule:
    """Plan who sends what to whom in a weight sync to `servers`, in their order.

    fields: learner.megatron. CannotReshard: the learner does not hold what the servers want.
    """
    learner = list(learner_holdings(spec, parallel, fields))
    firsts = first_receivers(servers)
    groups = [
        ServerGroup(
            tuple(plan_routes(learner, server_holdings(spec, layout.tp, layout.ep))),
            tuple(first for first, other in zip(firsts, servers, strict=False) if other == layout),
        )
        for layout in sorted(set(servers))
    ]
    return Schedule(groups, firsts[-1], max_elements_of_bucket)


def first_receivers(servers: Sequence[ServerLayout]) -> list[int]:
    """Return where each server's ranks start among those of all servers, and their number."""
    return list(accumulate((server.tp for server in servers), initial=0))


def server_share(schedule: Schedule, first: int, tp: int) -> str:
    """Return what the `tp` ranks of a server receive, as JSON, for sglang_bridge's receiver.

    first: the first of its ranks among those of all servers.
    """
    return json.dumps(
        [
            [
                [bucket.source, [[p.name, p.dim, p.start, p.length] for p in bucket.parts]]
                for bucket in schedule.incoming(receiver)
            ]
            for receiver in range(first, first + tp)
        ],
        separators=(",", ":"),
    )
