"""Compares the variance of importance weights with and without GEPO's expectation, exactly.

p is the learner's distribution over n outcomes, q the sampler's. The standard weight of an outcome
is p / q; GEPO's (Eq. 12) is p / A, where A = E_q[q] is one number. Its variance may be smaller;
its mean is <p, q> / A and no longer 1 (Eq. 22), so an average of weighted rewards misses E_p.

Axes: n outcomes, the last of every array.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moments:
    """Holds what Theorem 1 speaks of, one number a pair (p, q).

    kl: of p from q, in nats. standard, expected: the variance under q of p / q and of p / A.
    mean: of p / A; that of p / q is 1.
    """

    kl: Reals
    standard: Reals
    expected: Reals
    mean: Reals

    @property
    def gain(self) -> Reals:
        """Returns by how much GEPO's weights vary less; Eq. 30's Delta."""
        return self.standard - self.expected


def moments(p_n: Reals, q_n: Reals) -> Moments:
    """Compute the moments of pairs; every probability is positive (GEPO Eq. 21-25)."""
    mean_q = (q_n**2).sum(-1)
    mean = (p_n * q_n).sum(-1) / mean_q
    return Moments(
        kl=(p_n * np.log(p_n / q_n)).sum(-1),
        standard=(p_n**2 / q_n).sum(-1) - 1.0,
        expected=(p_n**2 * q_n).sum(-1) / mean_q**2 - mean**2,
        mean=mean,
    )


def simplex(outcomes: int, steps: int) -> Reals:
    """Return every distribution whose probabilities are positive multiples of 1 / steps."""
    return np.array(list(_compositions(outcomes, steps)), dtype=np.float64) / steps


def _compositions(parts: int, total: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield [stop - start for start, stop in pairwise(edges)]


def pairs(outcomes: int, steps: int) -> tuple[Reals, Reals]:
    """Return all pairs of the simplex's points, end to end."""
    points = simplex(outcomes, steps)
    count = len(points)
    return np.repeat(points, count, axis=0), np.tile(points, (count, 1))


def theorem(outcomes: int, steps: int) -> dict[str, Any]:
    """Check Theorem 1 with its constant n^2 + 1, and Corollary 1, on every pair of the simplex.

    smallest_constant: the least C that Eq. 13 holds with on these pairs. worse: share of pairs in
    which GEPO's weights vary more, and the largest divergence of one of them. without_constant: how
    often Eq. 13 fails with C = 0, as it must; identity_varies_least: how often a weight of 1, which
    corrects nothing, varies less than both.
    """
    found = moments(*pairs(outcomes, steps))
    bound = outcomes**2 + 1
    far = found.kl > np.log(bound)
    worse = found.gain < -1e-12
    short = np.exp(found.kl) - found.gain
    return {
        "outcomes": outcomes,
        "pairs": len(found.kl),
        "theorem_fails": int((short > bound + 1e-9).sum()),
        "smallest_constant": round(float(short.max()), 4),
        "paper_constant": bound,
        "beyond_corollary": int(far.sum()),
        "corollary_fails": int((far & worse).sum()),
        "worse_share": round(float(worse.mean()), 4),
        "worse_up_to_nats": round(float(found.kl[worse].max(initial=0.0)), 4),
        "corollary_nats": round(float(np.log(bound)), 4),
        "without_constant_fails": int((short > 1e-12).sum()),
        "identity_varies_least": int((np.minimum(found.standard, found.expected) > 1e-12).sum()),
    }


def bernoulli(points: int) -> list[list[float]]:
    """Return [p, q, KL, variance of p / q, of p / A] on a grid of two outcomes (Fig. 3, left)."""
    grid = (np.arange(points) + 0.5) / points
    p, q = (axis.ravel() for axis in np.meshgrid(grid, grid, indexing="ij"))
    found = moments(np.stack([p, 1 - p], -1), np.stack([q, 1 - q], -1))
    columns = (p, q, found.kl, found.standard, found.expected)
    return [[round(float(value), 5) for value in row] for row in zip(*columns, strict=True)]


def gaussian(mean: float, deviation: float) -> tuple[float, float, float]:
    """Return (KL, variance of p / q, of p / A) for p = N(mean, deviation^2), q = N(0, 1).

    By closed forms. The variance of p / q is infinite from deviation^2 = 2 on (Fig. 3, right).
    """
    var = deviation**2
    kl = 0.5 * (var + mean**2 - 1.0) - np.log(deviation)
    # E_q[(p / q)^2] = int p^2 / q
    standard = np.inf
    if var < 2.0:
        standard = np.exp(mean**2 / (2.0 - var)) / (deviation * np.sqrt(2.0 - var)) - 1.0
    mean_q = 1.0 / (2.0 * np.sqrt(np.pi))
    # int p q, and int p^2 q: p^2 is a normal density of variance var / 2 over 2 sd sqrt(pi)
    first = np.exp(-(mean**2) / (2.0 * (1.0 + var))) / np.sqrt(2.0 * np.pi * (1.0 + var))
    half = var / 2.0
    second = np.exp(-(mean**2) / (2.0 * (1.0 + half))) / np.sqrt(2.0 * np.pi * (1.0 + half))
    second /= 2.0 * deviation * np.sqrt(np.pi)
    return float(kl), float(standard), float((second - first**2) / mean_q**2)
