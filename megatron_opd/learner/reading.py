"""Gives every rank its part of a share: what its pipeline stage reads, checked by all together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_opd.batching.checks import check_batch, check_inputs
from megatron_opd.learner.agreement import agree
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.share_broadcast import deal
from megatron_opd.records.columns import RankInputs
from megatron_opd.transport.frames import check_sizes, from_frames, inputs_from_frames
from megatron_opd.transport.messages import ScoreShare, Train
from megatron_opd.transport.parts import Needs, part_of
from megatron_opd.transport.samples import Buffer

Collect = Callable[[Train, list[memoryview]], list[memoryview]]
"""Returns the frames of a share of which data workers hold a part; none if it is not to be had."""


class ShareReader:
    """Reads shares on every rank of the world. Collective.

    sampled: see check_batch. collect: called on heads alone.
    """

    def __init__(self, learner: MegatronLearner, *, sampled: bool, collect: Collect) -> None:
        self._learner, self._sampled, self._collect = learner, sampled, collect
        self._needs = stage_needs(learner)

    def read(self, request: Train | ScoreShare, frames: list[memoryview]) -> RankInputs | None:
        """Return this rank's part; None on every rank: some share is not to be had. Collective.

        frames: of the message, on heads alone. ValueError, on every rank: some rank refuses its
        part, or the head the whole.
        """
        world = self._learner.world
        batch: RankInputs | None = None
        refused: ValueError | None = None
        parts: list[list[Buffer]] = []
        lacks = False
        if world.is_head:
            try:
                if isinstance(request, Train) and request.parts:
                    frames = self._collect(request, frames)
                    lacks = not frames
                if not lacks:
                    parts = [part_of(frames, needs) for needs in self._needs]
            except ValueError as error:
                refused = error
        mine = deal(parts, world)
        if mine or (world.is_head and not lacks and refused is None):
            try:
                batch = self._decoded(request, mine)
            except ValueError as error:
                refused = error
        return batch if agree(refused, lacks, world) else None

    def _decoded(self, request: Train | ScoreShare, frames: list[Buffer]) -> RankInputs:
        learner, spec = self._learner, self._learner.spec
        update = request.update if isinstance(request, Train) else 0
        share = (update, request.version, request.plan, frames)
        if learner.world.last_stage:
            batch = from_frames(*share)
            vocab_size, experts = spec.num_ids, spec.num_experts
            check_batch(batch, vocab_size=vocab_size, num_experts=experts, sampled=self._sampled)
            if isinstance(request, Train) and request.parts:
                check_sizes(batch, request.sizes)
        else:
            batch = inputs_from_frames(*share)
            check_inputs(batch, vocab_size=spec.num_ids, num_experts=spec.num_experts)
        if learner.routing is not None:
            learner.routing.check(batch)
        return batch


def stage_needs(learner: MegatronLearner) -> list[Needs]:
    """Return what each pipeline stage reads of a sample, on every rank. Collective."""
    world, replays = learner.world, learner.config.replays_experts
    of_layers = sum(learner.spec.moe_layers) if replays else 0
    held = torch.zeros((world.parallel.pp, of_layers), dtype=torch.int64, device=world.device)
    if replays and learner.routing is not None:
        held[world.pp_rank, list(learner.routing.layers)] = 1
    if world.size > 1 and of_layers:
        dist.all_reduce(held, dist.ReduceOp.MAX)
    return [
        Needs(
            cache=stage == world.parallel.pp - 1,
            layers=tuple(layer for layer, here in enumerate(row) if here),
            of_layers=of_layers,
            gates=learner.config.replays_gates,
        )
        for stage, row in enumerate(held.tolist())
    ]
