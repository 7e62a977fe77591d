"""Estimates avg@k and pass@k of a model from the right completions of each problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """Holds a mean over problems and its standard error, both in percent.

    stderr_pct: sample deviation of the problems' values over the root of their number; nan for one
    problem. It says how the mean would vary over other problems of the same kind, and includes the
    noise of sampling; mean +- 1.96 stderr_pct is a 95% interval where there are many problems.
    """

    mean_pct: float
    stderr_pct: float


def over_problems(values_P: Sequence[float]) -> Estimate:
    """Return the mean of one value in [0, 1] for each of P problems."""
    values = np.asarray(values_P, dtype=np.float64)
    stderr = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(100 * float(values.mean()), 100 * float(stderr))


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Return the estimated probability that at least one of k completions is right.

    1 - C(n - c, k) / C(n, k) with c right ones of n samples (Chen et al. 2021, arXiv 2107.03374,
    Eq. 1): unbiased. Computed as a product of factors in [0, 1], so that no binomial coefficient
    overflows. ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"pass@k: correct must be in 0..{samples}, got {correct}")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@k: k must be in 1..{samples}, got {k}")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))
