"""The gap's figures against sums written out token by token."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.metrics.mismatch import WORST, compare, default_edges

LOGP = st.floats(-12, 0, width=32)
RESPONSES = st.lists(st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=12), min_size=1)


def arrays(responses, side):
    return [np.array([token[side] for token in each], np.float32) for each in responses]


def quantile(values, q):
    """Linear between the two values beside the place (n - 1) q."""
    values = sorted(values)
    place = (len(values) - 1) * q
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


@settings(max_examples=200, deadline=None)
@given(RESPONSES, st.floats(0.01, 0.9))
def test_every_figure_against_plain_sums(responses, threshold):
    found = compare(arrays(responses, 0), arrays(responses, 1), [3, 6], threshold)
    gaps = [[abs(math.exp(p) - math.exp(q)) for p, q in each] for each in responses]
    largest, flat = [max(each) for each in gaps], [gap for each in gaps for gap in each]
    tokens = [token for each in responses for token in each]
    gap = found.gap
    assert (gap.responses, gap.tokens) == (len(responses), len(tokens))
    for name, q in (("median", 0.5), ("p90", 0.9), ("max", 1.0)):
        assert getattr(gap.max_dp, name) == pytest.approx(quantile(largest, q), abs=1e-12)
        means = [sum(each) / len(each) for each in gaps]
        assert getattr(gap.mean_dp, name) == pytest.approx(quantile(means, q), abs=1e-12)
    assert gap.token_mean_dp == pytest.approx(sum(flat) / len(flat), abs=1e-12)
    k1 = sum(p - q for p, q in tokens) / len(tokens)
    k3 = sum(math.expm1(q - p) - (q - p) for p, q in tokens) / len(tokens)
    assert gap.k1_nats == pytest.approx(k1, rel=1e-9, abs=1e-9)
    assert gap.k3_nats == pytest.approx(k3, rel=1e-9, abs=1e-9)
    assert gap.k3_nats >= 0
    assert gap.above == sum(value > threshold for value in flat) / len(flat)
    assert gap.responses_above == sum(value > threshold for value in largest) / len(largest)
    assert found.by_response["max_dp"] == pytest.approx(largest, abs=1e-12)
    for bucket, (first, last) in zip(found.by_length, ((1, 3), (4, 99)), strict=True):
        inside = [each for each in gaps if first <= len(each) <= last]
        assert (bucket.gap is None) == (not inside)
        if bucket.gap is not None:
            assert bucket.gap.responses == len(inside)
            assert bucket.gap.max_dp.max == pytest.approx(max(map(max, inside)), abs=1e-12)
    assert sum(place.tokens for place in found.by_position) == len(tokens)
    for place in found.by_position:
        there = [value for each in gaps for value in each[place.first - 1 : place.last]]
        assert place.max_dp == pytest.approx(max(there), abs=1e-12)
        assert place.mean_dp == pytest.approx(sum(there) / len(there), abs=1e-12)
    worst = [abs(each.p - each.q) for each in found.worst]
    assert worst == pytest.approx(sorted(flat, reverse=True)[:WORST], abs=1e-12)
    for each in found.worst:
        p, q = responses[each.response][each.position - 1]
        assert (each.p, each.q) == pytest.approx((math.exp(p), math.exp(q)), abs=1e-12)


def test_equal_log_probs_have_no_gap_and_others_have_one():
    p = [np.log(np.array([0.5, 0.25], np.float32)), np.log(np.array([0.125], np.float32))]
    same = compare(p, p, [2], 0.1).gap
    assert (same.max_dp.max, same.token_mean_dp, same.k1_nats, same.k3_nats) == (0, 0, 0, 0)
    other = compare(p, [p[0] + np.float32(0.5), p[1]], [2], 0.1).gap
    assert other.max_dp.max == pytest.approx(0.5 * math.expm1(0.5), rel=1e-6)
    assert other.max_dp.median == pytest.approx(0.25 * math.expm1(0.5), rel=1e-6)
    assert other.above == pytest.approx(2 / 3)
    assert other.responses_above == 0.5


def test_k1_and_k3_estimate_the_divergence():
    """Both means over many draws from p come to sum p log p/q; k3 stays above 0."""
    rng = np.random.default_rng(0)
    p_V, q_V = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6) * 4)
    ids = rng.choice(6, 200_000, p=p_V)
    gap = compare([np.log(p_V)[ids]], [np.log(q_V)[ids]], [1], 0.1).gap
    exact = float((p_V * np.log(p_V / q_V)).sum())
    assert gap.k1_nats == pytest.approx(exact, abs=0.02)
    assert gap.k3_nats == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("lengths", [([], []), ([0], [0]), ([2], [3])])
def test_what_cannot_be_compared_is_refused(lengths):
    p, q = ([np.zeros(n, np.float32) for n in side] for side in lengths)
    with pytest.raises(ValueError, match=r"at least one token|the same tokens"):
        compare(p, q, [4], 0.1)


def test_default_buckets_double():
    assert default_edges(64) == [8, 16, 32, 64]
    assert default_edges(2) == [1, 2]
