"""Turns a Rollout into a Sample with the teacher's log-prob of every cached id, or drops it.

Of a mixture every teacher is asked (mixing.py). A score that cannot be used (scores.py) drops its
sample with a counted reason, and so does a verifier that fails.
scoring.attempts counts every try of a sample, over all servers; no lower layer retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial, reduce
from typing import Protocol, TypeVar

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.config.roles import Role, answering
from megatron_opd.config.schema import Config
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.environments.trajectory import trajectory_limits
from megatron_opd.records.drops import (
    ENVIRONMENT_NO_REWARD,
    NO_ANSWER,
    TEACHER_BAD_REPLY,
    TEACHER_REFUSED,
    TEACHER_TIMED_OUT,
    TEACHER_UNAVAILABLE,
    TEACHER_UNREACHABLE,
)
from megatron_opd.records.imitation import is_imitated
from megatron_opd.records.mixtures import Shares
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.seeds import SCORE, derived_seed
from megatron_opd.records.sequences import by_sequence
from megatron_opd.records.types import (
    AnyRollout,
    AnySample,
    HeldRollout,
    HeldSample,
    IntArray,
    Rollout,
    Sample,
    rollout_here,
)
from megatron_opd.rollout.alignment.reading import Reader
from megatron_opd.rollout.alignment.scoring import aligned_ask, aligned_scores
from megatron_opd.rollout.mixing import Blend, asks_of
from megatron_opd.rollout.overlong import CUT, judged_length
from megatron_opd.rollout.score_requests import TeacherAsk, asked_of
from megatron_opd.rollout.scores import unscored, with_scores
from sglang_bridge.arrays import pack
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


class ChangingWeights(Protocol):
    """Names the method of weight_sync.live.LiveVersion that scoring needs."""

    async def of_one_version(self, ask: Callable[[], Awaitable[Answer]]) -> tuple[Answer, int]:
        """Return an answer of the servers, and the version that gave all of it."""
        ...


Elsewhere = Callable[
    [ScoreFleet, HeldRollout, TeacherAsk, int], Awaitable[tuple[HeldRollout, ScoreShape]]
]
"""Scores a sequence of what is held; returns what is held then, and the shape of its scores."""


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
        versions: of the teachers whose weights change; a sample is scored by one of them.
        reader: of a teacher of another tokenizer; None: it reads the student's ids.
    """

    def __init__(
        self,
        config: Config,
        fleets: Mapping[Role, ScoreFleet],
        vocab_size: int,
        run_id: str,
        reward: Reward | None = None,
        elsewhere: Elsewhere | None = None,
        versions: Mapping[Role, ChangingWeights] | None = None,
        reader: Reader | None = None,
    ) -> None:
        self._config, self._vocab_size, self._reader = config, vocab_size, reader
        roles = answering(config)
        self._fleets = {name: fleets[role] for name, role in roles.items()}
        changing = {} if versions is None else versions
        self._versions = {name: changing[role] for name, role in roles.items() if role in changing}
        self._run_id, self._reward, self._elsewhere = run_id, reward, elsewhere
        # asked for every sample, and prompts have few weights
        estimator = config.estimator
        self._needs_teacher = lru_cache(estimator.needs_teacher)
        self._needs_reward = lru_cache(estimator.needs_reward)
        theirs = estimator.support.owner == "teacher"
        self._num_atoms = estimator.support.num_atoms(vocab_size) if theirs else 0
        self._num_draws = estimator.support.num_draws if theirs else 0
        share, size = estimator.imitated_share, config.rollout.group_size
        self._written = partial(is_imitated, group_size=size, share=share)
        self._backoff = Backoff(config.scoring.attempts)

    async def score(self, rollout: AnyRollout) -> AnySample:
        """Return a Sample with log q of every id in rollout.draws, and the reward.

        Raises ScoreRejected. No teacher is asked where no loss would read its scores. Where the
        support is the teacher's, its selection replaces rollout.draws. What the teacher wrote is
        neither scored nor judged.
        """
        limit = rollout.prompt.max_new_tokens or self._config.rollout.max_new_tokens
        if self._config.environment is not None:
            most = self._config.rollout.max_new_tokens
            limit = trajectory_limits(self._config.environment, most).most_sampled
        length = judged_length(self._config.selection.overlong, rollout, limit)
        if self._written(rollout.prompt.uid):
            return unscored(rollout_here(rollout), masked=length.masked)
        reward, prompt = await self._judged(rollout), rollout.prompt
        needed = self._needs_teacher(prompt.reward_weight, prompt.teacher_weight)
        asks = needed and not length.masked
        if isinstance(rollout, HeldRollout):
            if not asks:
                return HeldSample(rollout, None, reward, length.penalty, length.masked)
            scored_there = partial(self._scored_there, rollout)
            (held, shape), version = await self._of_one_version(prompt.shares, scored_there)
            return HeldSample(held, shape, reward, length.penalty, length.masked, version)
        sample = unscored(rollout, reward, length.penalty, masked=length.masked)
        if not asks:
            return sample
        score = partial(self._scored, sample)
        sample, version = await self._of_one_version(prompt.shares, score)
        return sample if version is None else replace(sample, teacher_version=version)

    async def _of_one_version(
        self, shares: Shares, score: Callable[[], Awaitable[Answer]]
    ) -> tuple[Answer, int | None]:
        """Return scores, and the version of the weights that gave them all; None: there is one.

        Of a mixture the oldest of its teachers' versions, each of which scores by one.
        """
        changing = [name for name, _ in shares if name in self._versions]
        if not changing:
            return await score(), None
        first, others = changing[0], tuple(each for each in shares if each[0] in changing[1:])
        within = partial(self._of_one_version, others, score)
        (found, oldest), version = await self._versions[first].of_one_version(within)
        return found, version if oldest is None else min(version, oldest)

    async def _scored(self, sample: Sample) -> Sample:
        parts = by_sequence(sample)
        if len(parts) == 1:
            return await self._scored_sequence(sample, 0)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._scored_sequence(part, number))
                    for number, part in enumerate(parts)
                ]
        except* ScoreRejected as rejected:  # the first is the reason of the whole sample
            first = rejected.exceptions[0]
            assert isinstance(first, ScoreRejected)
            raise first from None
        return with_scores(sample, [task.result() for task in tasks])

    async def _scored_sequence(self, part: Sample, sequence: int) -> Sample:
        if self._reader is not None:
            return await self._aligned(part, self._reader)
        blend = Blend(part)
        for ask in self._asks(part.rollout, sequence):
            fleet, request = self._fleets[ask.teacher], asked_of(blend.part.rollout, ask)
            reply = await self._answered(lambda _, fleet=fleet, asked=request: fleet.score(asked))
            blend = blend.after(ask, request, reply)
        return blend.part

    async def _aligned(self, sample: Sample, reader: Reader) -> Sample:
        """Return the sample with the scores of a teacher that reads it in other tokens."""
        alignment = self._config.scoring.alignment
        assert alignment is not None, "a reader is made for it"
        (ask,) = self._asks(sample.rollout, 0)
        fleet, asked = self._fleets[ask.teacher], aligned_ask(sample, reader, ask)
        reply = await self._answered(lambda _: fleet.score(asked.request))
        return aligned_scores(sample, asked, reply, alignment.unaligned)

    async def _scored_there(self, rollout: HeldRollout) -> tuple[HeldRollout, ScoreShape]:
        """Let the data worker that holds the rollout ask the teachers, a sequence at a time."""
        assert self._elsewhere is not None, "a data worker holds the rollout"
        held, shapes = rollout, list[ScoreShape]()
        for sequence in range(len(rollout.sizes)):
            asks = self._asks(rollout, sequence)
            for ask in asks:
                fleet = self._fleets[ask.teacher]
                score = partial(self._elsewhere, fleet, held, ask, sequence)
                held, shape = await self._answered(lambda _, score=score: score())
                if ask is asks[-1]:
                    shapes.append(shape)
        return held, reduce(ScoreShape.joined, shapes)

    async def _answered(self, call: Callable[[int], Awaitable[Answer]]) -> Answer:
        """Return the first answer. ScoreRejected: there is none."""
        try:
            return await retried(call, self._backoff)
        except BridgeError as error:
            raise ScoreRejected(teacher_reason(error), str(error)) from error

    def _asks(self, rollout: AnyRollout, sequence: int) -> list[TeacherAsk]:
        """Return what the teachers of a sequence are asked, in order."""
        uid, of = rollout.prompt.uid, () if sequence == 0 else (sequence,)
        own_Q, between = rollout.prompt.teacher_ids_Q, list[IntArray]()
        if isinstance(rollout, Rollout) and rollout.teacher_given:
            own_Q, *between = rollout.teacher_given
        ask = TeacherAsk(
            "-".join([self._run_id, "score", *map(str, (uid, *of))]),
            self._config.scoring.temperature,
            self._num_atoms,
            self._num_draws,
            derived_seed(self._config.run.seed, SCORE, uid, *of),
            self._vocab_size,
            None if own_Q is None else pack(own_Q),
            tuple(map(pack, between)),
        )
        return asks_of(rollout.prompt.shares, ask)

    async def _judged(self, rollout: AnyRollout) -> float | None:
        """Return the reward; None where there is none and no objective reads it.

        0 where a limit ended a trajectory before its environment gave one, as in evaluations.
        """
        if self._config.estimator.credit == "turn":
            return self._of_turns(rollout)
        reward = None
        try:
            if self._reward is not None:
                reward = await self._reward(rollout)
        except VerifierFailed as failed:
            why = f"{rollout.prompt.row_id}: {failed.detail}"
            raise ScoreRejected(failed.reason, why) from failed
        if reward is None and self._needs_reward(rollout.prompt.reward_weight):
            if rollout.turns and rollout.finish_reason == CUT:
                return 0.0
            raise ScoreRejected(NO_ANSWER, f"prompt {rollout.prompt.uid} has no answer to verify")
        return reward

    def _of_turns(self, rollout: AnyRollout) -> float | None:
        """Return the sum of the turns' rewards; None where a limit ended it before any.

        No verifier is asked: its reward would be no turn's.
        """
        rewards = [turn.reward for turn in rollout.turns if turn.reward is not None]
        ended = rollout.finish_reason != CUT
        if not rewards and ended and self._needs_reward(rollout.prompt.reward_weight):
            why = f"{rollout.prompt.row_id}: none of {len(rollout.turns)} turns has a reward"
            raise ScoreRejected(ENVIRONMENT_NO_REWARD, why)
        return sum(rewards) if rewards else None


def teacher_reason(error: BridgeError) -> str:
    """Return why what a teacher's servers did not answer is dropped."""
    if isinstance(error, BadReply):
        return TEACHER_BAD_REPLY
    if isinstance(error, ServerUnreachable) and error.timed_out:
        return TEACHER_TIMED_OUT
    if not is_transient(error):
        return TEACHER_REFUSED
    return TEACHER_UNREACHABLE if isinstance(error, ServerUnreachable) else TEACHER_UNAVAILABLE
