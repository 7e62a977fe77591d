"""Puts a teacher's reply into a sample, or says why it cannot be used. Pure functions of arrays.

A score that is missing, misshapen, infinite or NaN drops its sample; it never reaches the learner,
where one NaN would spoil all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.records.drops import (
    TEACHER_BAD_REPLY,
    TEACHER_INFINITE,
    TEACHER_MISSHAPEN,
    TEACHER_NAN,
    TEACHER_UNKNOWN_ID,
)
from megatron_opd.records.sample_figures import joined_parts
from megatron_opd.records.sequences import joined_draws
from megatron_opd.records.types import FloatArray, Rollout, Sample
from sglang_bridge.protocol import DrawCache, ScoreReply, ScoreRequest, Selection


def unscored(
    rollout: Rollout, reward: float | None = None, penalty: float = 0.0, *, masked: bool = False
) -> Sample:
    """Return a sample that no teacher scores; see Sample.teacher_logp_N."""
    unread_N = np.full(rollout.num_ids, np.nan, dtype=np.float32)
    return Sample(rollout, unread_N, reward, penalty, masked)


def scored(sample: Sample, request: ScoreRequest, reply: ScoreReply, vocab_size: int) -> Sample:
    """Return the sample with log q of every cached id. Raises ScoreRejected.

    Where the request selects, the teacher's selection replaces the draws. vocab_size: ids of the
    student; a teacher may have more, and what it selects itself may be one of them, of which the
    student has no log-prob.
    """
    rollout = sample.rollout
    if not request.selects:
        return replace(sample, teacher_logp_N=checked(reply.logp_N, rollout.draws.num_ids))
    if reply.selection is None:
        raise ScoreRejected(
            TEACHER_BAD_REPLY, f"request {request.rid} came back without a selection"
        )
    draws = selected(rollout.draws, reply.selection)
    largest = int(draws.ids_N.max(initial=0))
    if largest >= vocab_size:
        raise ScoreRejected(TEACHER_UNKNOWN_ID, f"{largest}, the student has {vocab_size} ids")
    teacher_logp_N = checked(reply.selection.logp_N, draws.num_ids)
    return replace(sample, rollout=replace(rollout, draws=draws), teacher_logp_N=teacher_logp_N)


def with_scores(sample: Sample, parts: Sequence[Sample]) -> Sample:
    """Return the sample with the scores of its sequences, and the caches that they have now."""
    draws = joined_draws([part.rollout.draws for part in parts])
    scores_N = np.concatenate([part.teacher_logp_N for part in parts])
    mixed = all(part.parts for part in parts)
    shapes = reduce(joined_parts, [part.parts for part in parts]) if mixed else ()
    rollout = replace(sample.rollout, draws=draws)
    return replace(sample, rollout=rollout, teacher_logp_N=scores_N, parts=shapes)


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
        raise ScoreRejected(
            TEACHER_MISSHAPEN, f"the selection is not of these {path.num_tokens} tokens"
        )
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
        raise ScoreRejected(
            TEACHER_MISSHAPEN, f"expected {num_ids} scores, got shape {logp_N.shape}"
        )
    if np.isnan(logp_N).any():
        raise ScoreRejected(TEACHER_NAN, f"{int(np.isnan(logp_N).sum())} of {num_ids} scores")
    if np.isinf(logp_N).any():
        raise ScoreRejected(TEACHER_INFINITE, f"{int(np.isinf(logp_N).sum())} of {num_ids} scores")
    return logp_N
