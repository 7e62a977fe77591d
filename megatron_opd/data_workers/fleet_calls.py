"""Lets data workers make the calls of a fleet: whom it chooses is asked by its worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.types import HeldRollout, Prompt
from megatron_opd.rollout.generator import Sampler
from megatron_opd.rollout.score_requests import TeacherAsk
from megatron_opd.rollout.scorer import Elsewhere, ScoreFleet
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import RolloutRequest


def sampled_by_workers(pool: WorkerPool, fleet: Fleet) -> Sampler:
    """Return what samples from a fleet, and leaves the arrays with data workers."""

    def sample(prompt: Prompt, request: RolloutRequest, restarts: int) -> Awaitable[HeldRollout]:
        started_s = asyncio.get_running_loop().time()
        return fleet.ask(
            lambda client: pool.generate(client, prompt, request, started_s, restarts),
            lambda rollout: rollout.num_response_tokens,
        )

    return sample


def scored_by_workers(pool: WorkerPool, vocab_sizes: Mapping[str, int]) -> Elsewhere:
    """Return what lets a fleet score what data workers hold. vocab_sizes: of teachers, by name."""

    def score(
        fleet: ScoreFleet, rollout: HeldRollout, ask: TeacherAsk, sequence: int
    ) -> Awaitable[tuple[HeldRollout, ScoreShape]]:
        assert isinstance(fleet, Fleet)
        vocab_size = vocab_sizes[ask.teacher]
        return fleet.ask(
            lambda client: pool.score(client, rollout, ask, vocab_size, sequence),
            lambda _: rollout.sizes[sequence].sampled,
        )

    return score
