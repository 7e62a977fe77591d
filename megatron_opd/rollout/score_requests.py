"""Builds what a teacher is asked: log-probs of the ids that were cached along a sequence.

A teacher may read another prompt than the student (Prompt.teacher_ids_Q). The response behind it is
the student's, id by id: rows of scores are those of its tokens wherever these stand.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from megatron_opd.records.runs import SampledRun
from megatron_opd.records.types import IntArray, Rollout
from sglang_bridge.arrays import unpack
from sglang_bridge.protocol import ScoreRequest


class MixtureStep(msgspec.Struct, frozen=True):
    """Says where in the scoring of a mixture an ask is (mixing.py).

    weight: of its teacher. draws: that all teachers make at a token.
    """

    number: int
    weight: float
    draws: int
    last: bool


class TeacherAsk(msgspec.Struct, frozen=True):
    """Says how a teacher is to score a rollout; the fields are ScoreRequest's.

    vocab_size: ids of the student. prompt: what the teacher reads instead of the student's prompt,
    packed (sglang_bridge/arrays.py); None: the same. between: what it reads instead in front of
    each further run; none: the same. teacher: its name. step: of a mixture.
    """

    rid: str
    temperature: float
    num_atoms: int
    num_draws: int
    seed: int | None
    vocab_size: int
    prompt: bytes | None = None
    between: tuple[bytes, ...] = ()
    teacher: str = ""
    step: MixtureStep | None = None


def asked_of(rollout: Rollout, ask: TeacherAsk) -> ScoreRequest:
    """Ask for the scores of the cached ids of a rollout of one sequence. ValueError: bad bytes."""
    if ask.prompt is not None:
        rollout = behind(rollout, *(unpack(each, "<i4") for each in (ask.prompt, *ask.between)))
    plain = score_request(ask.rid, rollout, ask.temperature)
    return msgspec.structs.replace(
        plain, num_atoms=ask.num_atoms, num_draws=ask.num_draws, seed=ask.seed
    )


def behind(rollout: Rollout, prompt_ids_Q: IntArray, *between: IntArray) -> Rollout:
    """Return a rollout of one sequence behind other given ids; what was sampled stays as it is.

    between: int32 [G], in front of each run after the first; none: as they are.
    """
    (ids_S,) = rollout.sequences
    ends = [run.stop for run in rollout.runs]
    starts = [run.start for run in rollout.runs]
    same = [ids_S[stop:start] for stop, start in zip(ends[:-1], starts[1:], strict=True)]
    given = [prompt_ids_Q, *(between or same)]
    parts: list[IntArray] = []
    runs: list[SampledRun] = []
    length = 0
    for run, ids_G in zip(rollout.runs, given, strict=True):
        sampled = ids_S[run.start : run.stop]
        start = length + len(ids_G)
        length = start + len(sampled)
        runs.append(msgspec.structs.replace(run, start=start, stop=length))
        parts += [ids_G.astype(ids_S.dtype), sampled]
    return replace(rollout, sequences=(np.concatenate(parts),), runs=tuple(runs))


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
