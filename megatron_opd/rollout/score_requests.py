"""Builds what a teacher is asked: log-probs of the ids that were cached along a response."""

from __future__ import annotations

import msgspec
import numpy as np

from megatron_opd.records.types import IntArray, Rollout
from sglang_bridge.protocol import DrawCache, ScoreRequest


class TeacherAsk(msgspec.Struct, frozen=True):
    """Says how a teacher is to score a rollout; the fields are ScoreRequest's.

    vocab_size: ids of the student.
    """

    rid: str
    temperature: float
    num_atoms: int
    num_draws: int
    seed: int | None
    vocab_size: int


def asked_of(rollout: Rollout, ask: TeacherAsk) -> ScoreRequest:
    """Ask for the scores of a rollout's cached ids."""
    prompt_ids_P, ids_T = rollout.prompt.token_ids_P, rollout.response_ids_T
    plain = score_request(ask.rid, prompt_ids_P, ids_T, rollout.draws, ask.temperature)
    return msgspec.structs.replace(
        plain, num_atoms=ask.num_atoms, num_draws=ask.num_draws, seed=ask.seed
    )


def score_request(
    rid: str,
    prompt_ids_P: IntArray,
    response_ids_T: IntArray,
    cached: DrawCache,
    temperature: float,
    *,
    exact: bool = False,
) -> ScoreRequest:
    """Ask for log q of every cached id at its position; the rest is ScoreRequest's."""
    return ScoreRequest(
        rid=rid,
        input_ids=np.concatenate([prompt_ids_P, response_ids_T]),
        runs=((len(prompt_ids_P), len(prompt_ids_P) + len(response_ids_T)),),
        offsets_T1=cached.offsets_T1,
        ids_N=cached.ids_N,
        temperature=temperature,
        exact=exact,
    )
