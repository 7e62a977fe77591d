"""Makes the forward passes before the loss's own, for what the loss needs or is compared with.

These are the batch's start, M2PO's statistics, and the mismatch with the learner's own routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.random import (
    _fork_rng,  # pyright: ignore[reportPrivateUsage]
)

from megatron_opd.config.estimator import Estimator
from megatron_opd.learner.forward import collect_caches, mismatch_totals
from megatron_opd.learner.micro_batch import DistilMicro
from megatron_opd.learner.routing import MicroRouting
from megatron_opd.learner.student_logp import StudentLogp
from megatron_opd.learner.totals import Mismatch
from megatron_opd.learner.world import World
from megatron_opd.losses.cache import Cache
from megatron_opd.losses.objective import View, m2_limit_of, m2_view


@dataclass(frozen=True)
class ForwardPasses:
    """Makes the passes. Every rank of the world calls the same methods: they hold collectives.

    scores_start: log-probs of the batch's start are wanted, by the loss or for metrics.
    record_routing: later mini-batches are to use the routing of the batch's start.
    """

    model: Sequence[DistributedDataParallel]
    world: World
    head: StudentLogp
    estimator: Estimator
    temperature: float
    scores_start: bool
    record_routing: bool = False

    def with_prox(self, minis: Sequence[Sequence[DistilMicro]]) -> list[list[DistilMicro]]:
        """Add the learner's log-probs of the batch's start to the mini-batches, where wanted.

        The first mini-batch gets none, and no pass: the loss's own log-probs are those of the
        batch's start, before its optimizer step. The passes also record the routing.
        """
        if not self.scores_start and self.record_routing:
            for mini in minis[1:]:
                self._caches(mini)
        if not self.scores_start:
            return [list(mini) for mini in minis]
        return [list(minis[0]), *(self._with_own(mini) for mini in minis[1:])]

    def _with_own(self, mini: Sequence[DistilMicro]) -> list[DistilMicro]:
        caches = self._caches(mini)
        if not self.world.last_stage:  # no log-probs here, and no loss
            return list(mini)
        real, fillers = _without_fillers(mini)
        return [
            replace(micro, prox_logp_N=cache.student_logp_N)
            for micro, cache in zip(real, caches, strict=True)
        ] + fillers

    def with_m2_limits(self, mini: Sequence[DistilMicro]) -> list[DistilMicro]:
        """Add M2PO's limits over all ranks to the mini-batch, where a trust region has one."""
        if not self.estimator.needs_statistics:
            return list(mini)
        caches = self._caches(mini)
        if not self.world.last_stage:
            return list(mini)
        start = self.scores_start
        views = [
            m2_view(self.estimator, micro.cache(cache.student_logp_N, prox_is_student=start))
            for micro, cache in zip(_without_fillers(mini)[0], caches, strict=True)
        ]
        gathered: list[View] = [
            (_gathered(parts[0]), _gathered(parts[1]), _gathered(parts[2]))
            for parts in (
                [torch.cat([view[term][column] for view in views]) for column in range(3)]
                for term in range(len(self.estimator.terms))
            )
        ]
        limits = tuple(m2_limit_of(self.estimator, caches[0], gathered))
        return [replace(micro, m2_limits=limits) for micro in mini]

    def mismatch_without_replay(self, mini: Sequence[DistilMicro]) -> Mismatch:
        """Return what the mismatch would be if every router chose for itself.

        The loss's own pass makes the same random choices (dropout, jitter) as if this one had not
        been.
        """
        free = [_routed_freely(micro) for micro in mini]
        with _fork_rng():
            totals = mismatch_totals(self.model, free, self.world, self.head, self.temperature)
        return totals.on_host().mismatch()

    def _caches(self, mini: Sequence[DistilMicro]) -> list[Cache]:
        return collect_caches(self.model, mini, self.world, self.head, self.temperature)


def _without_fillers(mini: Sequence[DistilMicro]) -> tuple[list[DistilMicro], list[DistilMicro]]:
    """Return the micro-batches of samples, and the fillers, which are the last of a mini-batch."""
    real = [micro for micro in mini if not micro.rows.is_filler]
    return real, list(mini[len(real) :])


def compared_only(micro: DistilMicro) -> DistilMicro:
    """Return the micro-batch with every router free, and its choice compared with what is given."""
    packing = copy(micro.rows.packing)
    routing: MicroRouting | None = packing.routing
    if routing is not None:
        packing.routing = None
        if routing.given:
            packing.routing = replace(routing, follows=False, moved={})
    return replace(micro, rows=replace(micro.rows, packing=packing))


def own_gates(micro: DistilMicro) -> DistilMicro:
    """Return the micro-batch with the given experts, weighed by the learner's own routers."""
    packing = copy(micro.rows.packing)
    routing: MicroRouting | None = packing.routing
    if routing is not None:
        packing.routing = replace(routing, gates={}, moved={})
    return replace(micro, rows=replace(micro.rows, packing=packing))


def _routed_freely(micro: DistilMicro) -> DistilMicro:
    """Return the micro-batch with nothing given and nothing recorded."""
    packing = copy(micro.rows.packing)
    packing.routing = None
    return replace(micro, rows=replace(micro.rows, packing=packing))


def _gathered(value_n: torch.Tensor) -> torch.Tensor:
    """Gather the values of every data-parallel rank, end to end; ranks hold different numbers."""
    group: Any = ps.get_data_parallel_group()
    size = dist.get_world_size(group)
    if size == 1:
        return value_n
    count = torch.full((1,), len(value_n), device=value_n.device)
    gathered = [torch.zeros_like(count) for _ in range(size)]
    dist.all_gather(gathered, count, group=group)
    counts = torch.cat(gathered).tolist()
    padded = value_n.new_zeros(max(counts))
    padded[: len(value_n)] = value_n
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:c] for part, c in zip(parts, counts, strict=True)])
