"""Rollout to Sample: the teacher's log-prob of every cached id, or the sample is dropped.

A score that is missing, misshapen, infinite or not a number drops its sample with a counted reason;
it never reaches the learner, where one NaN would spoil all weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.config.schema import ScoringConfig
from megatron_opd.teacher.retry import Backoff, is_transient, retried
from megatron_opd.types import FloatArray, Rollout, Sample
from sglang_bridge.errors import BadReply, BridgeError, RequestAborted
from sglang_bridge.protocol import ScoreReply, ScoreRequest

BAD_REPLY, UNREACHABLE, REFUSED = "teacher_bad_reply", "teacher_unreachable", "teacher_refused"
MISSHAPEN, NAN, INFINITE = "teacher_misshapen", "teacher_nan", "teacher_infinite"

Reward = Callable[[Rollout], float | None]
"""A verifier's judgement of a rollout; None when there is nothing to compare with."""


class ScoreFleet(Protocol):
    """The part of sglang_bridge.fleet.Fleet that scoring needs."""

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Log-probs of every id of the request."""
        ...


class FleetScorer:
    """Scores rollouts on the teacher fleet. How many are in flight is the caller's choice.

    Args:
        fleet: the teacher servers.
        scoring: how often a score is tried before its sample is dropped.
        run_id: makes request names unique.
        reward: the verifier, called once for every scored rollout.
        backoff: overrides the waits between tries.
    """

    def __init__(
        self,
        fleet: ScoreFleet,
        scoring: ScoringConfig,
        run_id: str,
        reward: Reward | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._fleet = fleet
        self._run_id = run_id
        self._reward = reward
        self._backoff = Backoff(scoring.attempts) if backoff is None else backoff

    async def score(self, rollout: Rollout) -> Sample:
        """Teacher log-probs at temperature 1 of every id in rollout.draws. Raises ScoreRejected."""
        prompt, draws = rollout.prompt, rollout.draws
        request = ScoreRequest(
            rid=f"{self._run_id}-score-{prompt.uid}",
            input_ids=np.concatenate([prompt.token_ids_P, rollout.response_ids_T]),
            num_prompt_tokens=len(prompt.token_ids_P),
            offsets_T1=draws.offsets_T1,
            ids_N=draws.ids_N,
        )
        try:
            reply = await retried(lambda: self._fleet.score(request), self._backoff)
        except BridgeError as error:
            raise ScoreRejected(_reason(error), str(error)) from error
        teacher_logp_N = checked(reply.logp_N, draws.num_ids)
        reward = None if self._reward is None else self._reward(rollout)
        return Sample(rollout, teacher_logp_N, reward)


def checked(logp_N: FloatArray, num_ids: int) -> FloatArray:
    """`logp_N` as float32 [N]. Raises ScoreRejected when it is not N finite numbers.

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
    return UNREACHABLE if is_transient(error) or isinstance(error, RequestAborted) else REFUSED
