"""Measures how well student and teacher understand each other, from selections of both.

At every response token t the student's servers and the teacher's give their K likeliest ids S_t and
Q_t, and some draws from the rest, each with weights that sum an expectation (DrawCache). p is the
student's distribution now, q the teacher's:

    overlap     |S_t and Q_t| / K
    advantage   mean of q_k (log p_k - log q_k) over the ids k of both S_t and Q_t
    mass        sum of q_k over S_t
    entropy     -sum of w_k log p_k over the student's selection; of q over the teacher's
    d_t         sum of w_k (log p_k - log q_k) over the student's selection: KL(p || q)
    eos KL      KL of the two Bernoulli distributions of whether the response ends here

Overlap and advantage as in arXiv:2604.13016 and verl. Axes: T response tokens, N (token, id) pairs
of the student's selection, M of the teacher's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from sglang_bridge.protocol import IntArray, OffsetArray, Selection

DoubleArray = npt.NDArray[np.float64]
LOSS_SHARE = 0.8
LEAST_PROBABILITY = 1e-12
"""Probabilities of ending are kept this far from 0 and 1: float32 log-probs say no more."""
PREFIX = "health_"
"""Begins every column of these figures."""


@dataclass(frozen=True, slots=True)
class ScoredSelection:
    """Holds one response's selections. teacher: its request gave all of student.ids_N."""

    student: Selection
    teacher: Selection


@dataclass(frozen=True, slots=True)
class HealthFigures:
    """Describes the tokens of some responses.

    overlap_advantage: None where nothing overlaps. loss_tokens_80: the smallest share of tokens
    with 80% of the sum of |d_t|; None where all are 0. eos_gap: mean p - q of ending.
    """

    topk_overlap: float
    overlap_advantage: float | None
    teacher_mass: float
    student_entropy_nats: float
    teacher_entropy_nats: float
    loss_tokens_80: float | None
    eos_kl_nats: float
    eos_gap: float
    tokens: int

    def columns(self) -> dict[str, float | int | None]:
        """Return the columns of a row."""
        return {f"{PREFIX}{name}": value for name, value in asdict(self).items()}


def measure(
    responses: Sequence[ScoredSelection], top_k: int, end_ids: frozenset[int]
) -> HealthFigures:
    """Measure the tokens of one response or more, all weighing the same.

    top_k: K. end_ids: those that end a response; each is in every row of the student's selection.
    """
    parts = [_per_token(scored, top_k, end_ids) for scored in responses]
    overlap_T, advantage_T, mass_T, student_T, teacher_T, divergence_T, p_end_T, q_end_T = (
        np.concatenate(columns) for columns in zip(*parts, strict=True)
    )
    overlaps_T = ~np.isnan(advantage_T)
    p_T = np.clip(p_end_T, LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    q_T = np.clip(q_end_T, LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    eos_kl_T = p_T * np.log(p_T / q_T) + (1 - p_T) * np.log((1 - p_T) / (1 - q_T))
    return HealthFigures(
        topk_overlap=float(overlap_T.mean()),
        overlap_advantage=float(advantage_T[overlaps_T].mean()) if overlaps_T.any() else None,
        teacher_mass=float(mass_T.mean()),
        student_entropy_nats=float(student_T.mean()),
        teacher_entropy_nats=float(teacher_T.mean()),
        loss_tokens_80=tokens_with(LOSS_SHARE, np.abs(divergence_T)),
        eos_kl_nats=float(eos_kl_T.mean()),
        eos_gap=float((p_end_T - q_end_T).mean()),
        tokens=len(overlap_T),
    )


def tokens_with(share: float, loss_T: DoubleArray) -> float | None:
    """Return the smallest share of tokens whose losses, each >= 0, sum to `share` of them all."""
    total = loss_T.sum()
    if total <= 0:
        return None
    summed_T = np.cumsum(np.sort(loss_T)[::-1])
    return float((np.searchsorted(summed_T, share * total * (1 - 1e-12)) + 1) / len(loss_T))


def _per_token(
    scored: ScoredSelection, top_k: int, end_ids: frozenset[int]
) -> tuple[DoubleArray, ...]:
    """Return [T] each: overlap, advantage, mass, entropies, d_t, p and q of ending."""
    student, teacher = scored.student, scored.teacher
    tokens = len(student.offsets_T1) - 1
    row_N = _rows(student.offsets_T1)
    p_N = student.logp_N.astype(np.float64)
    q_N = teacher.logp_N[teacher.given_N].astype(np.float64)

    def total(value_N: DoubleArray, among_N: npt.NDArray[np.bool_] | None = None) -> DoubleArray:
        kept = slice(None) if among_N is None else among_N
        return np.bincount(row_N[kept], value_N[kept], tokens).astype(np.float64)

    ours_N = likeliest(student.offsets_T1, p_N, top_k)
    theirs_M = likeliest(teacher.offsets_T1, teacher.logp_N.astype(np.float64), top_k)
    both_N = ours_N & theirs_M[teacher.given_N]
    count_T = total(both_N.astype(np.float64))
    with np.errstate(invalid="ignore"):  # 0 / 0 where nothing overlaps: NaN, left out later
        advantage_T = total(np.exp(q_N) * (p_N - q_N), both_N) / count_T
    weight_N = student.weight_N.astype(np.float64)
    weighed_M = teacher.weight_N * teacher.logp_N.astype(np.float64)
    ends_N = np.isin(student.ids_N, list(end_ids))
    return (
        count_T / top_k,
        advantage_T,
        total(np.exp(q_N), ours_N),
        -total(weight_N * p_N),
        -np.bincount(_rows(teacher.offsets_T1), weighed_M, tokens).astype(np.float64),
        total(weight_N * (p_N - q_N)),
        total(np.exp(p_N), ends_N),
        total(np.exp(q_N), ends_N),
    )


def likeliest(offsets_T1: OffsetArray, logp_N: DoubleArray, top_k: int) -> npt.NDArray[np.bool_]:
    """Mark the top_k entries of every row with the largest log-probs, bool [N]."""
    order_N = np.lexsort((-logp_N, _rows(offsets_T1)))
    rank_N = np.arange(len(logp_N)) - np.repeat(offsets_T1[:-1], np.diff(offsets_T1))
    marked_N = np.zeros(len(logp_N), dtype=bool)
    marked_N[order_N] = rank_N < top_k
    return marked_N


def _rows(offsets_T1: OffsetArray) -> IntArray:
    return np.repeat(np.arange(len(offsets_T1) - 1, dtype=np.int32), np.diff(offsets_T1))
