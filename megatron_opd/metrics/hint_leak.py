"""Measures how much of what a hint changes about a teacher is that hint, and how much any hint.

A teacher reads a student's response behind three prompts: without a hint (q0), with the hint of its
row (q) and with the hint of another row (q'). At token t

    a_t(v) = log q(v) - log q0(v),  b_t(v) = log q'(v) - log q0(v)

are what either hint would teach a student that is q0: q0(v) (a_t(v) - E a_t) is the direction in
which reverse KL moves its logits. The product of two directions is their covariance under q0,

    <a, b> = sum over t of E[a_t b_t] - E[a_t] E[b_t],

which at two sequences' ends is the covariance of what both say of a whole response, as steps of a
martingale add up. With it

    hint share = 1 - <a, b> / <a, a>

is 0 where another row's hint teaches the same (style), 1 where it teaches nothing of it, above 1
where it teaches against it. b stands for a hint drawn at random: what another hint says of its own
row is no part of a, and averages out. KL(q0 || q) says how much a hint changes at all.

Axes: T response tokens, N (token, id) pairs of q0's selection, B responses. All in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from sglang_bridge.protocol import FloatArray, Selection

PREFIX = "leak_"
"""Begins every column of these figures."""
LEAST_NATS = 1e-4
"""KL(q0 || q) in nats a token below which a hint changes nothing: rounding makes as much."""
WARN_SHARE = 0.2
"""Hint share below which another row's hint teaches as much, by more than its error."""
ERRORS = 2.0
"""Standard errors by which the share must be below."""


@dataclass(frozen=True, slots=True)
class HintedScores:
    """Holds what a teacher says of one response behind three prompts.

    without: its selection without a hint. right_N, wrong_N: log-probs of without.ids_N with the
    hint of its row, and of another row. scored_tokens: that it read for all three.
    """

    without: Selection
    right_N: FloatArray
    wrong_N: FloatArray
    scored_tokens: int


@dataclass(frozen=True, slots=True)
class LeakFigures:
    """Describes the hints of some responses.

    hint_share: see the module; None where the hints change nothing. hint_share_error: its standard
    error over responses; None of one. right_nats, wrong_nats: KL(q0 || q) and KL(q0 || q'), mean
    over tokens. tokens: of the responses. scored_tokens: that were read for these figures.
    """

    hint_share: float | None
    hint_share_error: float | None
    right_nats: float
    wrong_nats: float
    responses: int
    tokens: int
    scored_tokens: int

    def columns(self) -> dict[str, float | int | None]:
        """Return the columns of a row."""
        return {f"{PREFIX}{name}": value for name, value in asdict(self).items()}


def measure(responses: Sequence[HintedScores]) -> LeakFigures:
    """Measure one response or more; their tokens weigh the same."""
    rows = np.array([_of_response(scored) for scored in responses])
    product_B, energy_B, right_B, wrong_B, tokens_B = rows.T
    tokens = float(tokens_B.sum())
    right_nats = float(right_B.sum() / tokens)
    share = error = None
    if right_nats >= LEAST_NATS and energy_B.sum() > 0:
        share = 1 - float(product_B.sum() / energy_B.sum())
        error = _error(product_B, energy_B)
    return LeakFigures(
        hint_share=share,
        hint_share_error=error,
        right_nats=right_nats,
        wrong_nats=float(wrong_B.sum() / tokens),
        responses=len(responses),
        tokens=int(tokens),
        scored_tokens=sum(scored.scored_tokens for scored in responses),
    )


def _of_response(scored: HintedScores) -> tuple[float, float, float, float, int]:
    """Return <a, b>, <a, a>, the sums over tokens of both KLs, and the tokens."""
    without = scored.without
    tokens = len(without.offsets_T1) - 1
    row_N = np.repeat(np.arange(tokens), np.diff(without.offsets_T1))
    weight_N = without.weight_N.astype(np.float64)

    def mean(value_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.bincount(row_N, weight_N * value_N, tokens).astype(np.float64)

    q0_N = without.logp_N.astype(np.float64)
    a_N, b_N = scored.right_N - q0_N, scored.wrong_N - q0_N
    a_T, b_T = mean(a_N), mean(b_N)
    product, energy = mean(a_N * b_N) - a_T * b_T, mean(a_N * a_N) - a_T * a_T
    return float(product.sum()), float(energy.sum()), -float(a_T.sum()), -float(b_T.sum()), tokens


def _error(product_B: npt.NDArray[np.float64], energy_B: npt.NDArray[np.float64]) -> float | None:
    """Return the jackknife's standard error of sum(product) / sum(energy) over responses."""
    left_B = energy_B.sum() - energy_B
    number = len(energy_B)
    if number < 2 or (left_B <= 0).any():
        return None
    without_B = (product_B.sum() - product_B) / left_B
    return math.sqrt((number - 1) / number * float(((without_B - without_B.mean()) ** 2).sum()))


def leak_problem(columns: Mapping[str, float | int | None]) -> str | None:
    """Return what is wrong with hints, in plain words; None where nothing is, or nobody knows.

    columns: of a row of metrics.
    """
    right, share = columns.get(f"{PREFIX}right_nats"), columns.get(f"{PREFIX}hint_share")
    if right is None:
        return None
    if share is None:
        return f"the hints change nothing ({right:.2g} nats a token), so that they teach nothing"
    error = columns.get(f"{PREFIX}hint_share_error")
    if error is None or share + ERRORS * error >= WARN_SHARE:
        return None
    return (
        f"the hint of another row teaches as much as the right one: {share:.0%} (+- {error:.0%}) "
        f"of what the right hints change ({right:.2g} nats a token) is those hints, the rest is "
        "what any hint changes, such as style"
    )
