"""Computes what a group's weighted rewards estimate, exactly: over all groups that can be sampled.

A group of K responses is drawn from q; response i has outcome y_i and reward r(y_i), its advantage
is A_i = r_i - mean(r). What an update estimates is E_p[r] - E_q[r], the advantage that the learner
expects of its own responses (Figs. 6c and 7), by mean(w_i A_i).

Outcomes that no order tells apart are summed once: a group is how often each outcome is in it.
Axes: n outcomes, G groups, K their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement

import numpy as np

from studies.gepo.weights import Reals

DEFENSIVE_SCALE = 1.0
"""Eq. 15's share of p in the denominator is this times the variance of q over the group."""

Weigh = Callable[["Group"], Reals]
"""Returns the weights [G, n] of outcomes in each group; what is in none may be anything."""


@dataclass(frozen=True, slots=True)
class Group:
    """Holds every group that can be sampled.

    count_Gn: how often each outcome is in it. p_n, q_n: what the weights are made of, probabilities
    or their geometric means over a response's tokens. ratio_n: the standard weight.
    """

    count_Gn: Reals
    p_n: Reals
    q_n: Reals
    ratio_n: Reals


def standard(group: Group) -> Reals:
    """Weigh by the ratio: of the whole response, or of its geometric means (GSPO)."""
    return np.broadcast_to(group.ratio_n, group.count_Gn.shape)


def identity(group: Group) -> Reals:
    """Weigh all alike: no correction, the control."""
    return np.ones_like(group.count_Gn)


def expectation_G1(group: Group) -> Reals:
    """Return GEPO Eq. 11 of every group."""
    weighed = group.count_Gn * group.q_n
    return ((weighed * group.q_n).sum(1) / weighed.sum(1))[:, None]


def expected(group: Group) -> Reals:
    """Weigh by GEPO Eq. 12."""
    return group.p_n / expectation_G1(group)


def defensive(group: Group) -> Reals:
    """Weigh by GEPO Eq. 15."""
    size_G1 = group.count_Gn.sum(1, keepdims=True)
    mean_G1 = (group.count_Gn * group.q_n).sum(1, keepdims=True) / size_G1
    spread_Gn = group.count_Gn * (group.q_n - mean_G1) ** 2
    share_G1 = np.minimum(1.0, DEFENSIVE_SCALE * spread_Gn.sum(1, keepdims=True) / size_G1)
    return group.p_n / (share_G1 * group.p_n + (1.0 - share_G1) * expectation_G1(group))


WEIGHTS: dict[str, Weigh] = {
    "ratio": standard,
    "gepo": expected,
    "gepo_defensive": defensive,
    "none": identity,
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Describes the estimate of the expected advantage.

    variance: of one response's weight. bias: mean error. deviation: of the estimate.
    """

    variance: float
    bias: float
    deviation: float

    @property
    def error(self) -> float:
        """Returns the root of the mean squared error."""
        return math.hypot(self.bias, self.deviation)


@lru_cache
def counts(outcomes: int, size: int) -> tuple[Reals, Reals]:
    """Return how often each outcome is in each group, and how many orders each group has."""
    found = [
        np.bincount(chosen, minlength=outcomes)
        for chosen in combinations_with_replacement(range(outcomes), size)
    ]
    orders = [math.factorial(size) / math.prod(map(math.factorial, row.tolist())) for row in found]
    return np.array(found, dtype=np.float64), np.array(orders)


def estimate(
    weigh: Weigh, group: Group, chance_G: Reals, reward_n: Reals, target: float
) -> Estimate:
    """Describe the estimate of `target` by one kind of weight. chance_G: of every group."""
    share_Gn = group.count_Gn / group.count_Gn.sum(1, keepdims=True)
    weight_Gn = weigh(group)
    advantage_Gn = reward_n - (share_Gn * reward_n).sum(1, keepdims=True)
    first, second = (float(chance_G @ (share_Gn * weight_Gn**power).sum(1)) for power in (1, 2))
    found_G = (share_Gn * weight_Gn * advantage_Gn).sum(1)
    mean = float(chance_G @ found_G)
    deviation = math.sqrt(max(0.0, float(chance_G @ (found_G - mean) ** 2)))
    return Estimate(second - first**2, mean - target, deviation)


def groups_of(q_n: Reals, size: int) -> tuple[Reals, Reals]:
    """Return the groups of `size` responses sampled from q_n, and the chance of each."""
    count_Gn, orders_G = counts(len(q_n), size)
    return count_Gn, orders_G * np.exp(count_Gn @ np.log(q_n))
