"""Turns a Rollout into a Sample with the teacher's log-prob of every cached id, or drops it.

A score that is missing, misshapen, infinite or NaN drops its sample with a counted reason; it never
reaches the learner, where one NaN would spoil all weights. So does a verifier that fails.
scoring.attempts counts every try of a sample, over all servers; no lower layer retries.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.sections import ScoringConfig
from megatron_opd.data.seeds import SCORE, derived_seed
from megatron_opd.teacher.overlong import Length
from megatron_opd.teacher.requests import score_request
from megatron_opd.types import FloatArray, Rollout, Sample
from megatron_opd.verifiers.reward import VerifierFailed
from sglang_bridge.errors import BadReply, BridgeError, ServerUnreachable
from sglang_bridge.protocol import DrawCache, ScoreReply, ScoreRequest, Selection
from sglang_bridge.retry import Backoff, is_transient, retried

BAD_REPLY, UNREACHABLE, REFUSED = "teacher_bad_reply", "teacher_unreachable", "teacher_refused"
TIMED_OUT, UNKNOWN_ID = "teacher_timed_out", "teacher_unknown_id"
MISSHAPEN, NAN, INFINITE = "teacher_misshapen", "teacher_nan", "teacher_infinite"
NO_ANSWER = "no_answer"

Reward = Callable[[Rollout], Awaitable[float | None]]
"""Returns the reward of a rollout in [0, 1]; None when there is no answer to compare with. Raises
VerifierFailed."""


class ScoreFleet(Protocol):
    """Names the method of sglang_bridge.fleet.Fleet that scoring needs."""

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Return the log-probs of every id of the request, and of those it asks to select."""
        ...


class FleetScorer:
    """Scores rollouts on the teachers' servers; the caller chooses how many are in flight.

    Args:
        fleets: the servers of every teacher, by the name that prompts know it by; empty where the
            estimator reads none.
        estimator: whether teacher and reward are read, and what the teacher selects.
        vocab_size: ids of the student. A teacher may have more, and what it selects itself may be
            one of them, of which the student has no log-prob: that sample is dropped and counted.
        scoring: temperature, and how often a score is tried before its sample is dropped.
        run_id: makes request names unique.
        lengths: what a response's length does to it; None: nothing.
        reward: the verifier, called once for every rollout.
        backoff: overrides the waits between tries.
        seed: the run's; of what the teacher draws for a prompt, see ScoreRequest.
    """

    def __init__(
        self,
        fleets: Mapping[str, ScoreFleet],
        estimator: Estimator,
        vocab_size: int,
        scoring: ScoringConfig,
        run_id: str,
        reward: Reward | None = None,
        backoff: Backoff | None = None,
        seed: int = 0,
        lengths: Callable[[Rollout], Length] | None = None,
    ) -> None:
        self._estimator = estimator
        self._lengths = lengths
        self._fleets, self._seed, self._vocab_size = fleets, seed, vocab_size
        theirs = estimator.support.owner == "teacher"
        self._num_atoms = estimator.support.num_atoms(vocab_size) if theirs else 0
        self._num_draws = estimator.support.num_draws if theirs else 0
        self._temperature = scoring.temperature
        self._run_id = run_id
        self._reward = reward
        self._backoff = Backoff(scoring.attempts) if backoff is None else backoff

    async def score(self, rollout: Rollout) -> Sample:
        """Return a Sample with log q of every id in rollout.draws, and the reward.

        Raises ScoreRejected. No teacher is asked where no loss would read its scores. Where the
        support is the teacher's, its selection replaces rollout.draws.
        """
        length = Length() if self._lengths is None else self._lengths(rollout)
        reward, prompt = await self._judged(rollout), rollout.prompt
        unread_N = np.full(rollout.draws.num_ids, np.nan, dtype=np.float32)
        unscored = Sample(rollout, unread_N, reward, length.penalty, length.masked)
        needed = self._estimator.needs_teacher(prompt.reward_weight, prompt.teacher_weight)
        return unscored if length.masked or not needed else await self._scored(unscored)

    async def _scored(self, unscored: Sample) -> Sample:
        rollout = unscored.rollout
        fleet, request = self._fleets[rollout.prompt.teacher], self._request(rollout)
        try:
            reply = await retried(lambda _: fleet.score(request), self._backoff)
        except BridgeError as error:
            raise ScoreRejected(_reason(error), str(error)) from error
        if not request.selects:
            return replace(unscored, teacher_logp_N=checked(reply.logp_N, rollout.draws.num_ids))
        if reply.selection is None:
            raise ScoreRejected(BAD_REPLY, f"request {request.rid} came back without a selection")
        draws = selected(rollout.draws, reply.selection)
        largest = int(draws.ids_N.max(initial=0))
        if largest >= self._vocab_size:
            raise ScoreRejected(UNKNOWN_ID, f"{largest}, the student has {self._vocab_size} ids")
        teacher_logp_N = checked(reply.selection.logp_N, draws.num_ids)
        return replace(
            unscored, rollout=replace(rollout, draws=draws), teacher_logp_N=teacher_logp_N
        )

    async def _judged(self, rollout: Rollout) -> float | None:
        """Return the reward; None where there is none and no objective reads it."""
        reward = None
        try:
            if self._reward is not None:
                reward = await self._reward(rollout)
        except VerifierFailed as failed:
            why = f"{rollout.prompt.row_id}: {failed.detail}"
            raise ScoreRejected(failed.reason, why) from failed
        if reward is None and self._estimator.needs_reward(rollout.prompt.reward_weight):
            raise ScoreRejected(NO_ANSWER, f"prompt {rollout.prompt.uid} has no answer to verify")
        return reward

    def _request(self, rollout: Rollout) -> ScoreRequest:
        prompt = rollout.prompt
        return score_request(
            f"{self._run_id}-score-{prompt.uid}",
            prompt.token_ids_P,
            rollout.response_ids_T,
            rollout.draws,
            temperature=self._temperature,
            num_atoms=self._num_atoms,
            num_draws=self._num_draws,
            seed=derived_seed(self._seed, SCORE, prompt.uid),
        )


def selected(path: DrawCache, selection: Selection) -> DrawCache:
    """Join the teacher's selection with the path, which is all that `path` holds.

    weight_N: of the selection (0 for a path token that it does not hold). sampler_logp_N: known on
    the path alone, NaN elsewhere. Raises ScoreRejected when the rows are not those of the path.
    """
    path_T = selection.given_N[path.path_T]
    rows_fit = len(selection.offsets_T1) == len(path.offsets_T1) and np.array_equal(
        selection.ids_N[path_T], path.ids_N[path.path_T]
    )
    if not rows_fit:
        raise ScoreRejected(MISSHAPEN, f"the selection is not of these {path.num_tokens} tokens")
    sampler_logp_N = np.full(len(selection.ids_N), np.nan, dtype=np.float32)
    sampler_logp_N[path_T] = path.sampler_logp_N[path.path_T]
    return replace(
        path,
        offsets_T1=selection.offsets_T1,
        ids_N=selection.ids_N,
        path_T=path_T,
        weight_N=selection.weight_N,
        sampler_logp_N=sampler_logp_N,
    )


def checked(logp_N: FloatArray, num_ids: int) -> FloatArray:
    """Return `logp_N` as float32 [N]. Raises ScoreRejected when it is not N finite numbers.

    Minus infinity is refused too: a teacher that masks ids would send log-ratios to infinity.
    """
    logp_N = np.asarray(logp_N, dtype=np.float32)
    if logp_N.shape != (num_ids,):
        raise ScoreRejected(MISSHAPEN, f"expected {num_ids} scores, got shape {logp_N.shape}")
    if np.isnan(logp_N).any():
        raise ScoreRejected(NAN, f"{int(np.isnan(logp_N).sum())} of {num_ids} scores")
    if np.isinf(logp_N).any():
        raise ScoreRejected(INFINITE, f"{int(np.isinf(logp_N).sum())} of {num_ids} scores")
    return logp_N


def _reason(error: BridgeError) -> str:
    if isinstance(error, BadReply):
        return BAD_REPLY
    if isinstance(error, ServerUnreachable) and error.timed_out:
        return TIMED_OUT
    return UNREACHABLE if is_transient(error) else REFUSED
