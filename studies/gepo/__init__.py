"""Checks GEPO's theory by enumeration, and what its weights estimate beside GSPO's and GRPO's.

    python -m studies gepo

theorem: Theorem 1 and Corollary 1 on every pair of distributions of a grid (weights.py). bernoulli,
gaussian: the variances of Fig. 3. groups: with the denominator that a group of responses gives
(Eq. 11, 15), the estimate of the expected advantage by divergence, and how often each kind of
weight errs least. sequences: the same of whole responses (sequences.py), with correlations as in
Figs. 6 and 7. Everything is a sum over all outcomes; nothing is sampled but the policies.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from studies.gepo import sequences
from studies.gepo.groups import WEIGHTS, Group, estimate, groups_of
from studies.gepo.weights import bernoulli, gaussian, moments, pairs, theorem

GRIDS = ((2, 40), (3, 16), (4, 12), (5, 10))
POINTS = 20
MEANS, DEVIATIONS = (0.0, 0.5, 1.0, 2.0, 3.0), (0.5, 0.8, 1.0, 1.2, 1.4, 2.0)
SIZES, GROUP_GRID = (2, 8), (3, 12)
EDGES = (0.0, 0.05, 0.2, 0.5, 1.0, np.inf)
"""Divergences, in nats, between which pairs are described together."""
DRAWS = 200


def measure() -> dict[str, Any]:
    """Return every table."""
    return {
        "theorem": [theorem(outcomes, steps) for outcomes, steps in GRIDS],
        "bernoulli": bernoulli(POINTS),
        "gaussian": [
            [mean, deviation, *(round(value, 5) for value in gaussian(mean, deviation))]
            for mean in MEANS
            for deviation in DEVIATIONS
        ],
        "groups": [row for size in SIZES for row in groups(size)],
        "sequences": sequences.study(DRAWS),
    }


def groups(size: int) -> list[dict[str, Any]]:
    """Describe the estimates of groups of `size`, by the divergence of learner and sampler.

    A reward is 1 for the first outcome. Means over pairs; best: share of pairs in which a kind of
    weight has the smallest error.
    """
    p_Pn, q_Pn = pairs(*GROUP_GRID)
    kl_P = moments(p_Pn, q_Pn).kl
    reward_n = np.eye(GROUP_GRID[0])[0]
    found = {kind: np.empty((len(kl_P), 4)) for kind in WEIGHTS}
    for at, (p_n, q_n) in enumerate(zip(p_Pn, q_Pn, strict=True)):
        count_Gn, chance_G = groups_of(q_n, size)
        group = Group(count_Gn, p_n, q_n, p_n / q_n)
        target = float((p_n - q_n) @ reward_n) * (size - 1) / size
        for kind, weigh in WEIGHTS.items():
            e = estimate(weigh, group, chance_G, reward_n, target)
            found[kind][at] = e.variance, abs(e.bias), e.deviation, e.error
    errors = np.stack([found[kind][:, 3] for kind in WEIGHTS])
    rows: list[dict[str, Any]] = []
    for low, high in pairwise(EDGES):
        inside = (kl_P > low) & (kl_P <= high)
        best = np.bincount(errors[:, inside].argmin(0), minlength=len(WEIGHTS)) / inside.sum()
        row: dict[str, Any] = {"size": size, "kl_above": low, "pairs": int(inside.sum())}
        for index, kind in enumerate(WEIGHTS):
            means = found[kind][inside].mean(0)
            names = ("variance", "bias", "deviation", "error")
            row[kind] = dict(zip(names, np.round(means, 5).tolist(), strict=True))
            row[kind]["best"] = round(float(best[index]), 4)
        rows.append(row)
    return rows
