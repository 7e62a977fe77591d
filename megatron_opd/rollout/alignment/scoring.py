"""Asks a teacher of another tokenizer for scores, and puts them into a sample. Arrays alone.

Where a sampled token is one of the teacher's too, each id that is cached at its position is scored
by its twin, the teacher's single token of the same bytes. That is at most the teacher's probability
of the bytes, as longer tokens spell them too.

drop: an id without a twin, and every id of a position where the teacher's token is another one,
gets weight 0, so that sum_k w_k f(a_k) estimates the expectation over the ids that have a score.

chunk: of the path alone. A chunk's advantage is log Q - log O, sums over the tokens that each side
cuts it into, and every token of the chunk gets all of it: teacher_logp - sampler_logp is that of
its chunk. sum_t A grad log p_t = A grad log P then, the policy gradient of the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.config.alignment import Unaligned
from megatron_opd.records.drops import TEACHER_UNALIGNED
from megatron_opd.records.sample_figures import AlignedScores
from megatron_opd.records.types import FloatArray, OffsetArray, Sample
from megatron_opd.rollout.alignment.reading import Reader, Reading
from megatron_opd.rollout.alignment.spans import NOWHERE
from megatron_opd.rollout.score_requests import TeacherAsk
from megatron_opd.rollout.scores import checked
from sglang_bridge.arrays import unpack
from sglang_bridge.protocol import ScoreReply, ScoreRequest


@dataclass(frozen=True, slots=True)
class AlignedAsk:
    """Holds a request and where the scores of a sample are in its reply; axes as in spans.py.

    place_N: int64 [N], the index of each cached id's score in the reply; NOWHERE: it has none.
    path_R: int64 [R], that of the teacher's own tokens.
    """

    request: ScoreRequest
    reading: Reading
    place_N: OffsetArray
    path_R: OffsetArray


def aligned_ask(sample: Sample, reader: Reader, ask: TeacherAsk) -> AlignedAsk:
    """Ask for the scores of a sample of one turn. ScoreRejected: the teacher can read none of it.

    ask.prompt: what the teacher reads before the response, in its own tokens.
    """
    rollout = sample.rollout
    assert ask.prompt is not None, "the teacher has tokens of its own"
    reading = reader.read(rollout.response_ids_T)
    ids_R, row_T = reading.ids_R, reading.spans.same_T
    if not len(ids_R):
        raise ScoreRejected(
            TEACHER_UNALIGNED,
            f"prompt {rollout.prompt.uid}: the teacher's tokenizer reads none of the response's "
            f"{len(row_T)} tokens as they are",
        )
    draws = rollout.draws
    row_N = np.repeat(row_T, np.diff(draws.offsets_T1))
    twin_N = reader.twin_V[draws.ids_N].astype(np.int64)
    has_N = (row_N != NOWHERE) & (twin_N >= 0)
    size = 1 + max(int(ids_R.max()), int(reader.twin_V.max()))
    first_R = np.arange(len(ids_R), dtype=np.int64) * size
    keys, places = np.unique(
        np.concatenate([first_R + ids_R, row_N[has_N] * size + twin_N[has_N]]), return_inverse=True
    )
    place_N = np.full(draws.num_ids, NOWHERE, np.int64)
    place_N[has_N] = places[len(ids_R) :]
    prompt_Q = unpack(ask.prompt, "<i4")
    request = ScoreRequest(
        rid=ask.rid,
        input_ids=np.concatenate([prompt_Q, ids_R]).astype(np.int32),
        runs=((len(prompt_Q), len(prompt_Q) + len(ids_R)),),
        offsets_T1=np.searchsorted(keys, np.append(first_R, len(ids_R) * size)),
        ids_N=(keys % size).astype(np.int32),
        temperature=ask.temperature,
    )
    return AlignedAsk(request, reading, place_N, places[: len(ids_R)])


def aligned_scores(
    sample: Sample, ask: AlignedAsk, reply: ScoreReply, unaligned: Unaligned
) -> Sample:
    """Return the sample with the scores of a reply. Raises ScoreRejected."""
    logp_M = checked(reply.logp_N, len(ask.request.ids_N))
    found = {"drop": _by_id, "chunk": _by_chunk}[unaligned](sample, ask, logp_M)
    if not (found.rollout.draws.weight_N > 0).any():
        raise ScoreRejected(
            TEACHER_UNALIGNED,
            f"prompt {sample.rollout.prompt.uid}: none of the response's "
            f"{sample.rollout.num_response_tokens} tokens lies on tokens of the teacher's",
        )
    return found


def _by_id(sample: Sample, ask: AlignedAsk, logp_M: FloatArray) -> Sample:
    draws = sample.rollout.draws
    has_N = ask.place_N != NOWHERE
    path_N = np.zeros(draws.num_ids, bool)
    path_N[draws.path_T] = True
    # what has no score and is no path token would be computed and sent for nothing
    kept_n = np.flatnonzero(has_N | path_N)
    ends_N1 = np.concatenate([[0], np.cumsum(has_N | path_N)])
    teacher_N = np.where(has_N, logp_M[ask.place_N], draws.sampler_logp_N)
    less = replace(
        draws,
        offsets_T1=ends_N1[draws.offsets_T1],
        ids_N=draws.ids_N[kept_n],
        path_T=ends_N1[draws.path_T],
        weight_N=np.where(has_N, draws.weight_N, np.float32(0))[kept_n],
        sampler_logp_N=draws.sampler_logp_N[kept_n],
    )
    return replace(
        sample,
        rollout=replace(sample.rollout, draws=less),
        teacher_logp_N=teacher_N[kept_n].astype(np.float32),
        aligned=AlignedScores(has_N[draws.path_T].astype(np.uint8), logp_M[ask.path_R]),
    )


def _by_chunk(sample: Sample, ask: AlignedAsk, logp_M: FloatArray) -> Sample:
    draws, spans = sample.rollout.draws, ask.reading.spans
    if draws.num_ids != draws.num_tokens:
        raise ValueError(f"chunks are of the path alone, got {draws.num_ids} cached ids")
    own_T = draws.sampler_logp_N.astype(np.float64)
    theirs_R = logp_M[ask.path_R].astype(np.float64)
    advantage_C = _by_number(spans.chunk_R, theirs_R, spans.num_chunks)
    advantage_C -= _by_number(spans.chunk_T, own_T, spans.num_chunks)
    in_T = spans.chunk_T != NOWHERE
    teacher_T = own_T + np.where(in_T, np.append(advantage_C, 0)[spans.chunk_T], 0)
    less = replace(draws, weight_N=np.where(in_T, draws.weight_N, np.float32(0)))
    return replace(
        sample,
        rollout=replace(sample.rollout, draws=less),
        teacher_logp_N=teacher_T.astype(np.float32),
        aligned=AlignedScores(in_T.astype(np.uint8), logp_M[ask.path_R], chunked=True),
    )


def _by_number(number_n: OffsetArray, value_n: np.ndarray, count: int) -> np.ndarray:
    """Return the sums of the values of each number from 0 to count - 1."""
    in_n = number_n != NOWHERE
    return np.bincount(number_n[in_n], value_n[in_n], minlength=count)
