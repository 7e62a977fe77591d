"""Builds what a teacher is asked: log-probs of the ids that were cached along a sequence."""

from __future__ import annotations

import msgspec

from megatron_opd.records.types import Rollout
from sglang_bridge.protocol import ScoreRequest


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
    """Ask for the scores of the cached ids of a rollout of one sequence."""
    plain = score_request(ask.rid, rollout, ask.temperature)
    return msgspec.structs.replace(
        plain, num_atoms=ask.num_atoms, num_draws=ask.num_draws, seed=ask.seed
    )


def score_request(
    rid: str, rollout: Rollout, temperature: float, *, exact: bool = False
) -> ScoreRequest:
    """Ask for log q of every cached id of a sequence; the rest is ScoreRequest's."""
    (ids_S,) = rollout.sequences
    return ScoreRequest(
        rid=rid,
        input_ids=ids_S,
        runs=tuple((run.start, run.stop) for run in rollout.runs),
        offsets_T1=rollout.draws.offsets_T1,
        ids_N=rollout.draws.ids_N,
        temperature=temperature,
        exact=exact,
    )
