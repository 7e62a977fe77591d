"""Turns a Rollout into a Sample with the teacher's log-prob of every cached id, or drops it.

A score that cannot be used (scores.py) drops its sample with a counted reason. So does a verifier
that fails.
scoring.attempts counts every try of a sample, over all servers; no lower layer retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Protocol, TypeVar

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.config.roles import Role, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.records.drops import (
    NO_ANSWER,
    TEACHER_BAD_REPLY,
    TEACHER_REFUSED,
    TEACHER_TIMED_OUT,
    TEACHER_UNAVAILABLE,
    TEACHER_UNREACHABLE,
)
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.seeds import SCORE, derived_seed
from megatron_opd.records.sequences import by_sequence
from megatron_opd.records.types import AnyRollout, AnySample, HeldRollout, HeldSample, Sample
from megatron_opd.rollout.overlong import judged_length
from megatron_opd.rollout.score_requests import TeacherAsk, asked_of
from megatron_opd.rollout.scores import scored, unscored, with_scores
from sglang_bridge.errors import BadReply, BridgeError, ServerUnreachable
from sglang_bridge.protocol import ScoreReply, ScoreRequest
from sglang_bridge.retry import Backoff, is_transient, retried

Answer = TypeVar("Answer")

Reward = Callable[[AnyRollout], Awaitable[float | None]]
"""Returns the reward of a rollout in [0, 1]; None when there is no answer to compare with. Raises
VerifierFailed."""


class ScoreFleet(Protocol):
    """Names the method of sglang_bridge.fleet.Fleet that scoring needs."""

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Return the log-probs of every id of the request, and of those it asks to select."""
        ...


Elsewhere = Callable[
    [ScoreFleet, HeldRollout, TeacherAsk], Awaitable[tuple[HeldRollout, ScoreShape]]
]
"""Scores what is held; returns what is held then, and the shape of its scores."""


class FleetScorer:
    """Scores rollouts on the teachers' servers; the caller chooses how many are in flight.

    Args:
        config: whether teacher and reward are read, and what the teacher selects; what a response's
            length does to it; how often a score is tried before its sample is dropped.
        fleets: the servers of every teacher that the estimator reads; others are left alone.
        vocab_size: ids of the student. A teacher may have more, and what it selects itself may be
            one of them, of which the student has no log-prob: that sample is dropped and counted.
        run_id: makes request names unique.
        reward: the verifier, called once for every rollout.
        elsewhere: scores what a data worker holds, in one try at one of a fleet's servers.
    """

    def __init__(
        self,
        config: Config,
        fleets: Mapping[Role, ScoreFleet],
        vocab_size: int,
        run_id: str,
        reward: Reward | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._config, self._vocab_size = config, vocab_size
        self._fleets = {name: fleets[role] for name, role in teacher_roles(config).items()}
        self._run_id, self._reward, self._elsewhere = run_id, reward, elsewhere
        # asked for every sample, and prompts have few weights
        estimator = config.estimator
        self._needs_teacher = lru_cache(estimator.needs_teacher)
        self._needs_reward = lru_cache(estimator.needs_reward)
        theirs = estimator.support.owner == "teacher"
        self._num_atoms = estimator.support.num_atoms(vocab_size) if theirs else 0
        self._num_draws = estimator.support.num_draws if theirs else 0
        self._backoff = Backoff(config.scoring.attempts)

    async def score(self, rollout: AnyRollout) -> AnySample:
        """Return a Sample with log q of every id in rollout.draws, and the reward.

        Raises ScoreRejected. No teacher is asked where no loss would read its scores. Where the
        support is the teacher's, its selection replaces rollout.draws.
        """
        limit = rollout.prompt.max_new_tokens or self._config.rollout.max_new_tokens
        if self._config.environment is not None:
            limit = self._config.environment.max_tokens
        length = judged_length(self._config.selection.overlong, rollout, limit)
        reward, prompt = await self._judged(rollout), rollout.prompt
        needed = self._needs_teacher(prompt.reward_weight, prompt.teacher_weight)
        asks = needed and not length.masked
        if isinstance(rollout, HeldRollout):
            held, shape = await self._scored_there(rollout) if asks else (rollout, None)
            return HeldSample(held, shape, reward, length.penalty, length.masked)
        sample = unscored(rollout, reward, length.penalty, masked=length.masked)
        return await self._scored(sample) if asks else sample

    async def _scored(self, sample: Sample) -> Sample:
        fleet, parts = self._fleet(sample.rollout), by_sequence(sample)
        if len(parts) == 1:
            return await self._scored_sequence(fleet, sample, self._ask(sample.rollout))
        asks = [self._ask(sample.rollout, number) for number in range(len(parts))]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._scored_sequence(fleet, part, ask))
                    for part, ask in zip(parts, asks, strict=True)
                ]
        except* ScoreRejected as rejected:  # the first is the reason of the whole sample
            first = rejected.exceptions[0]
            assert isinstance(first, ScoreRejected)
            raise first from None
        return with_scores(sample, [task.result() for task in tasks])

    async def _scored_sequence(self, fleet: ScoreFleet, part: Sample, ask: TeacherAsk) -> Sample:
        request = asked_of(part.rollout, ask)
        reply = await self._answered(lambda _: fleet.score(request))
        return scored(part, request, reply, self._vocab_size)

    def _scored_there(self, rollout: HeldRollout) -> Awaitable[tuple[HeldRollout, ScoreShape]]:
        """Let the data worker that holds the rollout ask the teacher."""
        assert self._elsewhere is not None, "a data worker holds the rollout"
        score, fleet, ask = self._elsewhere, self._fleet(rollout), self._ask(rollout)
        return self._answered(lambda _: score(fleet, rollout, ask))

    async def _answered(self, call: Callable[[int], Awaitable[Answer]]) -> Answer:
        """Return the first answer. ScoreRejected: there is none."""
        try:
            return await retried(call, self._backoff)
        except BridgeError as error:
            raise ScoreRejected(_reason(error), str(error)) from error

    def _fleet(self, rollout: AnyRollout) -> ScoreFleet:
        return self._fleets[rollout.prompt.teacher]

    def _ask(self, rollout: AnyRollout, sequence: int = 0) -> TeacherAsk:
        uid, of = rollout.prompt.uid, () if sequence == 0 else (sequence,)
        return TeacherAsk(
            "-".join([self._run_id, "score", *map(str, (uid, *of))]),
            self._config.scoring.temperature,
            self._num_atoms,
            self._num_draws,
            derived_seed(self._config.run.seed, SCORE, uid, *of),
            self._vocab_size,
        )

    async def _judged(self, rollout: AnyRollout) -> float | None:
        """Return the reward; None where there is none and no objective reads it."""
        reward = None
        try:
            if self._reward is not None:
                reward = await self._reward(rollout)
        except VerifierFailed as failed:
            why = f"{rollout.prompt.row_id}: {failed.detail}"
            raise ScoreRejected(failed.reason, why) from failed
        if reward is None and self._needs_reward(rollout.prompt.reward_weight):
            raise ScoreRejected(NO_ANSWER, f"prompt {rollout.prompt.uid} has no answer to verify")
        return reward


def _reason(error: BridgeError) -> str:
    if isinstance(error, BadReply):
        return TEACHER_BAD_REPLY
    if isinstance(error, ServerUnreachable) and error.timed_out:
        return TEACHER_TIMED_OUT
    if not is_transient(error):
        return TEACHER_REFUSED
    return TEACHER_UNREACHABLE if isinstance(error, ServerUnreachable) else TEACHER_UNAVAILABLE
