"""GEPO's theory: the sums over outcomes and groups against plain loops over every one of them."""

import math
from itertools import product

import numpy as np
import pytest

from studies.gepo import groups as by_divergence
from studies.gepo import sequences
from studies.gepo.groups import WEIGHTS, Group, estimate, groups_of
from studies.gepo.weights import gaussian, moments, simplex, theorem

P, Q = np.array([0.5, 0.2, 0.3]), np.array([0.1, 0.65, 0.25])
REWARD = np.array([1.0, 0.0, 0.5])
MIXED = np.array([1.0, 0, 0, 1, 0, 1, 1, 0])


def test_moments_are_those_of_the_weights_themselves():
    def variance(weights: list[float]) -> float:
        mean = sum(q * w for q, w in zip(Q, weights, strict=True))
        return sum(q * (w - mean) ** 2 for q, w in zip(Q, weights, strict=True))

    both = list(zip(P, Q, strict=True))
    level = sum(q * q for q in Q)
    found = moments(P, Q)
    assert found.standard == pytest.approx(variance([p / q for p, q in both]))
    assert found.expected == pytest.approx(variance([p / level for p in P]))
    assert found.mean == pytest.approx(sum(p * q for p, q in both) / level)
    assert found.kl == pytest.approx(sum(p * math.log(p / q) for p, q in both))


def test_the_simplex_is_all_of_its_points():
    points = {tuple(np.rint(point * 6).astype(int).tolist()) for point in simplex(3, 6)}
    assert points == {(i, j, 6 - i - j) for i in range(1, 5) for j in range(1, 6 - i)}


def test_the_theorem_holds_and_its_controls_fail():
    found = theorem(2, 40)
    assert found["theorem_fails"] == found["corollary_fails"] == 0
    assert found["beyond_corollary"] > 50, "there are pairs that the corollary speaks of"
    assert found["without_constant_fails"] > 1000
    assert found["worse_share"] > 0.1, "there are regions where GEPO is worse"
    assert 0 < found["worse_up_to_nats"] < found["corollary_nats"]


@pytest.mark.parametrize("mean", [0.0, 1.5])
@pytest.mark.parametrize("deviation", [0.6, 1.0, 1.3])
def test_normal_densities_against_a_sum_over_a_fine_grid(mean: float, deviation: float):
    x, step = np.linspace(-40, 40, 400_001, retstep=True)
    q = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    log_p = -((x - mean) ** 2) / (2 * deviation**2) - math.log(deviation * math.sqrt(2 * math.pi))
    log_ratio = log_p + x**2 / 2 + math.log(2 * math.pi) / 2
    p, level = np.exp(log_p), (q * q).sum() * step
    standard = np.exp(log_p + log_ratio).sum() * step - 1
    expected = (q * p * p).sum() * step / level**2 - ((q * p).sum() * step / level) ** 2
    kl = (p * log_ratio).sum() * step
    assert gaussian(mean, deviation) == pytest.approx((kl, standard, expected), rel=1e-6, abs=1e-9)


def test_heavy_tails_have_no_variance():
    assert gaussian(0.0, 1.5)[1] == math.inf


def weight(kind: str, y: int, level: float, share: float) -> float:
    """The weight of outcome y. level, share: Eq. 11 of its group, and Eq. 15's eps."""
    return {
        "ratio": P[y] / Q[y],
        "gepo": P[y] / level,
        "gepo_defensive": P[y] / (share * P[y] + (1 - share) * level),
        "none": 1.0,
    }[kind]


def ordered(kind: str, size: int) -> tuple[float, float, float]:
    """Variance of a weight, mean and deviation of the estimate, one ordered group after another."""
    sums = np.zeros(4)
    for ys in product(range(3), repeat=size):
        total = sum(Q[y] for y in ys)
        level = sum(Q[y] ** 2 for y in ys) / total
        share = sum((Q[y] - total / size) ** 2 for y in ys) / size
        weights = [weight(kind, y, level, share) for y in ys]
        baseline = sum(REWARD[y] for y in ys) / size
        found = sum(w * (REWARD[y] - baseline) for w, y in zip(weights, ys, strict=True)) / size
        each = np.array([np.mean(weights), np.mean(np.square(weights)), found, found**2])
        sums += math.prod(Q[y] for y in ys) * each
    return sums[1] - sums[0] ** 2, sums[2], math.sqrt(max(0.0, sums[3] - sums[2] ** 2))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_groups_without_order_are_all_ordered_groups(kind: str, size: int):
    count_Gn, chance_G = groups_of(Q, size)
    assert chance_G.sum() == pytest.approx(1.0)
    group = Group(count_Gn, P, Q, P / Q)
    target = float((P - Q) @ REWARD) * (size - 1) / size
    found = estimate(WEIGHTS[kind], group, chance_G, REWARD, target)
    variance, mean, deviation = ordered(kind, size)
    assert found.variance == pytest.approx(variance, abs=1e-12)
    assert found.bias == pytest.approx(mean - target, abs=1e-12)
    assert found.deviation == pytest.approx(deviation, abs=1e-7)
    if kind == "ratio":
        assert found.bias == pytest.approx(0.0, abs=1e-12)


def test_every_kind_of_weight_is_1_on_policy_but_those_of_a_group():
    policies = sequences.drawn(np.random.default_rng(3), 0.0)
    assert policies.kl == pytest.approx(0.0)
    for logp_nT in (policies.learner_nT, policies.sampler_nT):
        assert np.exp(logp_nT.sum(1)).sum() == pytest.approx(1.0)
    found = sequences.estimates(policies, MIXED)
    for kind in ("tokens", "response", "gspo", "none"):
        assert found[kind].variance == pytest.approx(0.0, abs=1e-9), kind
        assert found[kind].bias == pytest.approx(0.0, abs=1e-9), kind
    assert found["gepo"].variance > 1e-3
    assert abs(found["gepo"].bias) > 1e-4


def test_only_the_whole_ratio_is_without_bias():
    policies = sequences.drawn(np.random.default_rng(4), 1.0)
    found = sequences.estimates(policies, MIXED)
    assert found["response"].bias == pytest.approx(0.0, abs=1e-12)
    for kind in ("tokens", "gspo", "gepo", "gepo_defensive", "none"):
        assert abs(found[kind].bias) > 1e-4, kind


def test_rows_of_groups_hold_every_pair_once():
    rows = by_divergence(2)
    assert sum(row["pairs"] for row in rows) == 55 * 54, "those of two different distributions"
    for row in rows:
        assert sum(row[kind]["best"] for kind in WEIGHTS) == pytest.approx(1.0, abs=1e-3)
        assert row["ratio"]["bias"] < 1e-9
