"""Plans a whole weight sync from what is known before anything runs. Torch-free.

Learner ranks and controller make the same plan, each for itself, from config.json, the learner's
layout and the servers' layouts. Nobody needs to send it to the learner; the servers get their part.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.models.spec import ModelSpec
from megatron_opd.weight_sync.holdings import (
    Held,
    as_held,
    learner_holdings,
    server_holdings,
)
from megatron_opd.weight_sync.reshard import plan_routes
from sglang_bridge.weights.formats import PLAIN, Format, Kind, item_bytes
from sglang_bridge.weights.message_order import Bucket, Limits, Route, SlicePlace, outgoing
from sglang_bridge.weights.share import encode_routes, encode_share


@dataclass(frozen=True, slots=True, order=True)
class ServerLayout:
    """Describes how one server is cut: tp ranks, ep of which split the experts."""

    tp: int
    ep: int


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """Says what servers hold, and how much of it moves at once.

    dtype: of what is not quantised. max_elements: numbers of a bucket. max_staged: bytes that a
    server rank can stage. relays: whether servers pass on what they receive.
    """

    dtype: str
    format: Format | None
    max_elements: int
    max_staged: float
    relays: bool = False

    @classmethod
    def of(cls, config: WeightSyncConfig, dtype: str, format: Format | None) -> Self:
        """Return what servers of `dtype` and `format` hold, and the limits of the configuration."""
        sizes = item_bytes(dtype)
        largest = sizes[PLAIN] if format is None else max(sizes.values())
        shadow = math.inf if config.staging_bytes is None else config.staging_bytes
        return cls(
            dtype,
            format,
            max_elements=max(1, config.bucket_bytes // largest),
            max_staged=shadow if config.staging else 0,
            relays=config.relay,
        )

    @property
    def item_bytes(self) -> Mapping[Kind, int]:
        """Returns the bytes of a number of each kind."""
        return item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """Holds the routes to each server of one layout, and where these servers are.

    staged: sent before the pause, to shadow buffers; paused: in the pause. firsts: the first
    receiver of each server.
    """

    staged: tuple[Route, ...]
    paused: tuple[Route, ...]
    firsts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """Says who sends what to whom in a weight sync."""

    layouts: tuple[LayoutPlan, ...]
    limits: Limits

    @property
    def sends_in_pause(self) -> bool:
        """Returns whether anything is left for the pause."""
        return any(layout.paused for layout in self.layouts)

    def outgoing(self, source: int, *, staged: bool) -> list[Bucket]:
        """Return what the learner rank `source` sends, in order."""
        groups = [
            (layout.staged if staged else layout.paused, layout.firsts) for layout in self.layouts
        ]
        return outgoing(groups, source, self.limits)

    def shares(self, urls: Sequence[str]) -> list[str]:
        """Return what each server, in order, must know to receive its part. urls: of all."""
        order = sorted(first for layout in self.layouts for first in layout.firsts)
        by_first = dict(zip(order, urls, strict=True))
        found: dict[int, str] = {}
        for layout in self.layouts:
            routes = encode_routes(layout.staged, layout.paused)
            names = [by_first[first] for first in layout.firsts]
            for index, first in enumerate(layout.firsts):
                place = SlicePlace(index, layout.firsts)
                found[first] = encode_share(routes, place, names, self.limits)
        return [found[first] for first in order]


def plan_sync(
    spec: ModelSpec,
    parallel: ParallelConfig,
    fields: Mapping[str, Any],
    servers: Sequence[ServerLayout],
    settings: SyncSettings,
    near: tuple[int, ...] = (),
) -> SyncPlan:
    """Plan a weight sync to `servers`, in their order.

    fields: learner.megatron. near: see Limits. CannotReshard: the learner does not hold what the
    servers want.
    """
    learner = list(as_held(learner_holdings(spec, parallel, fields), settings.format))
    *firsts, receivers = accumulate((server.tp for server in servers), initial=0)
    layouts: list[LayoutPlan] = []
    for layout in sorted(set(servers)):
        held = list(as_held(server_holdings(spec, layout.tp, layout.ep), settings.format))
        names = staged_names(held, settings.max_staged, settings.item_bytes)
        staged: list[Route] = []
        paused: list[Route] = []
        for route in plan_routes(learner, held):
            (staged if route.name in names else paused).append(route)
        at = tuple(first for first, other in zip(firsts, servers, strict=True) if other == layout)
        layouts.append(LayoutPlan(tuple(staged), tuple(paused), at))
    limits = Limits(parallel.world_size, receivers, settings.max_elements, settings.relays, near)
    return SyncPlan(tuple(layouts), limits)


def staged_names(
    held: Iterable[Held], max_bytes: float, item_bytes: Mapping[Kind, int]
) -> frozenset[str]:
    """Return the tensors that are staged: as many, from the first, as every rank can."""
    shares: dict[str, Counter[int]] = defaultdict(Counter)
    for part in held:
        for rank in part.ranks:
            shares[part.name][rank] += part.elements * item_bytes[part.kind]
    taken: Counter[int] = Counter()
    names: list[str] = []
    for name, share in shares.items():
        taken.update(share)
        if max(taken.values()) > max_bytes:
            break
        names.append(name)
    return frozenset(names)
