"""Lets data workers make the calls of a fleet: whom it chooses is asked by its worker."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_opd.rollout.generator import Sampler
from megatron_opd.teacher.requests import TeacherAsk
from megatron_opd.teacher.scorer import Elsewhere, ScoreFleet
from megatron_opd.types import HeldRollout, HeldSample, Prompt
from megatron_opd.workers.pool import WorkerPool
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import RolloutRequest


def sampled_by_workers(pool: WorkerPool, fleet: Fleet) -> Sampler:
    """Return what samples from a fleet, and leaves the arrays with data workers."""

    async def sample(prompt: Prompt, request: RolloutRequest) -> HeldRollout:
        return await fleet.ask(
            lambda client: pool.generate(client, prompt, request),
            lambda rollout: rollout.num_response_tokens,
        )

    return sample


def scored_by_workers(pool: WorkerPool, vocab_sizes: Mapping[str, int]) -> Elsewhere:
    """Return what lets a fleet score what data workers hold. vocab_sizes: of teachers, by name."""

    async def score(fleet: ScoreFleet, sample: HeldSample, ask: TeacherAsk) -> HeldSample:
        assert isinstance(fleet, Fleet)
        tokens = sample.rollout.num_response_tokens
        vocab_size = vocab_sizes[sample.rollout.prompt.teacher]
        return await fleet.ask(
            lambda client: pool.score(client, sample, ask, vocab_size), lambda _: tokens
        )

    return score
