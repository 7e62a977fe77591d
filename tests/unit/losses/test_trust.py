"""Trust regions: clip, dual clip, M2PO."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.config.trust import ClipTrust, M2Trust, NoTrust
from megatron_opd.losses.objective import evaluate, m2_limit_of, m2_view
from megatron_opd.losses.trust import (
    SUM_BLOCK,
    moved_along,
    running_sum,
    second_moment_limit,
    trusted,
)
from tests.support.loss_cases import accepted, cache_of, draw_rows, estimator, problem, student_logp

EVERY = 3  # of the accepted estimators: enough of each kind
actions = st.lists(
    st.tuples(st.floats(-2, 2), st.floats(-3, 3), st.floats(0.05, 1.0)), min_size=1, max_size=12
)


def columns(rows: list[tuple[float, float, float]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(x, dtype=torch.float64) for x in zip(*rows, strict=True))


@settings(deadline=None)
@given(st.floats(-2, 2), st.floats(-3, 3), st.sampled_from([None, 1.5, 3.0]))
def test_clip_is_a_lower_bound_with_no_gradient_where_it_stops(
    log_r: float, advantage: float, dual: float | None
):
    config = ClipTrust(low=0.2, high=0.3, dual=dual)
    x = torch.tensor([log_r], dtype=torch.float64, requires_grad=True)
    A = torch.tensor([advantage], dtype=torch.float64)
    got = trusted(config, x, A, None)
    (slope,) = torch.autograd.grad(got.surrogate_n.sum(), x)
    r = math.exp(log_r)
    expected = min(r * advantage, min(max(r, 0.8), 1.3) * advantage)
    if dual is not None and advantage < 0:
        expected = max(expected, dual * advantage)
    assert float(got.surrogate_n.detach()) == pytest.approx(expected, abs=1e-12)
    if advantage >= 0 or dual is None:
        assert float(got.surrogate_n.detach()) <= r * advantage + 1e-12
    assert float(slope) == pytest.approx(0 if bool(got.stopped_n) else r * advantage, abs=1e-12)


@settings(deadline=None)
@given(actions, st.floats(0.001, 1.0))
def test_m2_keeps_the_most_it_may(rows: list[tuple[float, float, float]], threshold: float):
    """Mean within the threshold; one more distance would break it; nothing else is masked."""
    log_r, A, weight = columns(rows)
    config = M2Trust(threshold=threshold)
    limit = second_moment_limit(log_r, A, weight, config)
    got = trusted(config, log_r, A, limit)
    along, moment = moved_along(log_r, A), log_r.square()
    assert not bool((got.stopped_n & ~along).any())
    kept = along & ~got.stopped_n
    if bool(kept.any()):
        assert float((moment * weight)[kept].sum() / weight[kept].sum()) <= threshold + 1e-12
    if bool(got.stopped_n.any()):
        nearest = moment[got.stopped_n].min()
        more = along & (moment <= nearest)
        assert float((moment * weight)[more].sum() / weight[more].sum()) > threshold - 1e-12
    elif bool(along.any()):
        assert limit == torch.inf


@settings(deadline=None)
@given(actions, st.floats(0.001, 1.0))
def test_capped_m2_takes_the_mean_over_every_candidate(
    rows: list[tuple[float, float, float]], threshold: float
):
    """The authors' rule: all candidates, those beyond the limit counted as it, are within it."""
    log_r, A, weight = columns(rows)
    config = M2Trust(threshold=threshold, moment="capped")
    limit = second_moment_limit(log_r, A, weight, config)
    got = trusted(config, log_r, A, limit)
    along, moment = moved_along(log_r, A), log_r.square()
    assert torch.equal(got.stopped_n, along & (moment >= limit))
    if not bool(along.any()):
        assert limit == torch.inf
        return

    def mean_at(cap: torch.Tensor) -> float:
        return float((moment.clamp(max=cap) * weight)[along].sum() / weight[along].sum())

    assert mean_at(limit) <= threshold + 1e-12
    beyond = moment[along & (moment > limit)]
    if limit < torch.inf:
        assert mean_at(beyond.min()) > threshold - 1e-12, "a larger limit was allowed"
    kept = second_moment_limit(log_r, A, weight, M2Trust(threshold=threshold))
    assert limit <= kept, "capped masks at least what kept does"


@settings(deadline=None)
@given(actions, st.floats(0.001, 1.0), st.floats(0.0, 1.2), st.floats(0.0, 2.0))
def test_capped_m2_with_a_least_distance_is_a_clip_of_one_width(
    rows: list[tuple[float, float, float]], threshold: float, low: float, high: float
):
    """The authors' rule: PPO's minimum with the edges exp(-tau), exp(tau), or those if wider."""
    log_r, A, weight = columns(rows)
    log_r.requires_grad_(True)
    config = M2Trust(threshold=threshold, moment="capped", least_low=low, least_high=high)
    limit = second_moment_limit(log_r, A, weight, config)
    got = trusted(config, log_r, A, limit)
    tau = math.sqrt(float(limit))
    below, above = min(math.exp(-tau), 1 - low), max(math.exp(tau), 1 + high)
    r = log_r.exp()
    surrogate = torch.minimum(r * A, r.clamp(below, above) * A)
    (expected,) = torch.autograd.grad(surrogate.sum(), log_r)
    (found,) = torch.autograd.grad(got.surrogate_n.sum(), log_r)
    at_an_edge = (log_r.detach().abs() - tau).abs() < 1e-9  # masked here, just kept there
    at_an_edge |= (r.detach() - below).abs().minimum((r.detach() - above).abs()) < 1e-9
    assert torch.allclose(found[~at_an_edge], expected[~at_an_edge], atol=1e-12)
    plain = M2Trust(threshold=threshold, moment="capped")
    assert not bool((got.stopped_n & ~trusted(plain, log_r, A, limit).stopped_n).any())


def test_the_two_second_moments_differ_on_a_hand_made_batch():
    """Moments 0.01 x 8, 0.04, 1, 4 (mean 0.465): the limit is a budget of 0.1 over 11 tokens."""
    moment = torch.tensor([0.01] * 8 + [0.04, 1.0, 4.0], dtype=torch.float64)
    log_r, ones = moment.sqrt(), torch.ones(11, dtype=torch.float64)
    kept = second_moment_limit(log_r, ones, ones, M2Trust(threshold=0.12))
    # (0.08 + 0.04 + 1) / 10 = 0.112 <= 0.12 without the furthest
    assert float(kept) == pytest.approx(4.0)
    capped = second_moment_limit(log_r, ones, ones, M2Trust(threshold=0.12, moment="capped"))
    # capped at 1: (0.08 + 0.04 + 2) / 11 = 0.193 is too much; at 0.04: 0.018
    assert float(capped) == pytest.approx(0.04)


def test_m2_of_a_split_mini_batch_needs_the_whole_of_it():
    """Two halves with gathered views mask what the whole batch masks; each on its own does not."""
    est = estimator(objective={"trust": {"type": "m2", "threshold": 0.1}})
    case = problem(7, lengths=(15, 16), spread=1.0)
    rows = draw_rows(est.support, case, np.random.default_rng(0))
    whole = cache_of(est, case, rows, student_logp(case.student_TV, rows))
    stopped = evaluate(est, whole).terms[0].stopped_n
    views = m2_view(est, whole)
    parts = [tuple(x[i::2] for x in views[0]) for i in range(2)]
    joined = [tuple(torch.cat(x) for x in zip(*parts, strict=True))]
    assert m2_limit_of(est, whole, joined) == m2_limit_of(est, whole, None)
    alone = [second_moment_limit(*part, M2Trust(threshold=0.1)) for part in parts]
    assert len({float(x) for x in alone}) == 2
    assert 0 < int(stopped.sum()) < len(stopped)


def test_an_inactive_trust_region_changes_nothing():
    wide = {
        "clip": ClipTrust(low=1.0, high=1e9),
        "m2": M2Trust(threshold=1e9),
    }
    compared = 0
    for est in accepted()[::EVERY]:
        trust = getattr(est.objective, "trust", NoTrust())
        if trust.type not in wide:
            continue

        def with_trust(value, est=est):
            objective = est.objective.model_copy(update={"trust": value})
            return est.model_copy(update={"objective": objective})

        case = problem(3)
        rows = draw_rows(est.support, case, np.random.default_rng(0))
        results = []
        for variant in (with_trust(wide[trust.type]), with_trust(NoTrust())):
            logits = case.student_TV.clone().requires_grad_()
            loss = evaluate(variant, cache_of(est, case, rows, student_logp(logits, rows))).loss_sum
            (gradient,) = torch.autograd.grad(loss, logits)
            results.append((float(loss.detach()), gradient))
        assert results[0][0] == pytest.approx(results[1][0], rel=1e-13, abs=1e-14)
        torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=1e-14)
        compared += 1
    assert compared > 30


def test_trust_regions_do_act():
    for trust in ({"type": "clip"}, {"type": "clip", "dual": 1.5}, {"type": "m2"}):
        est = estimator(objective={"trust": trust})
        case = problem(3)
        rows = draw_rows(est.support, case, np.random.default_rng(0))
        result = evaluate(est, cache_of(est, case, rows, student_logp(case.student_TV, rows)))
        assert 0 < float(result.sums["stopped_weight"]) < float(result.sums["importance_weight"])


@pytest.mark.parametrize("count", [0, 1, SUM_BLOCK, SUM_BLOCK + 1, 3 * SUM_BLOCK**2 - 5])
def test_running_sums_are_exact_to_rounding(count: int):
    """Against sums without rounding; the longest takes three levels of blocks."""
    value_n = np.random.default_rng(count).lognormal(0, 3, count)
    exact, total = [], Fraction(0)
    for value in value_n:
        total += Fraction(float(value))
        exact.append(float(total))
    found = running_sum(torch.tensor(value_n))
    assert found.shape == (count,)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(exact, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("moment", ["kept", "capped"])
def test_limits_of_many_actions_equal_those_found_one_by_one(moment: str):
    rng = np.random.default_rng(3)
    count = 5 * SUM_BLOCK + 7
    log_r, A = torch.tensor(rng.normal(0, 0.3, count)), torch.tensor(rng.normal(size=count))
    weight = torch.tensor(rng.uniform(0.05, 1, count))
    along = sorted(
        (float(r) ** 2, float(w)) for r, a, w in zip(log_r, A, weight, strict=True) if r * a > 0
    )
    whole = sum(w for _, w in along)
    expected, below, summed = math.inf if moment == "kept" else 0.0, 0.0, 0.0
    for distance, w in along:
        below, summed = below + w, summed + w * distance
        if moment == "kept" and summed / below > 0.04:
            expected = distance
            break
        if moment == "capped" and (summed + distance * (whole - below)) / whole <= 0.04:
            expected = distance
    found = second_moment_limit(log_r, A, weight, M2Trust(threshold=0.04, moment=moment))
    assert 0 < expected < math.inf
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_without_actions_there_is_no_limit():
    none = torch.zeros(0)
    for moment in ("kept", "capped"):
        config = M2Trust(threshold=0.1, moment=moment)
        assert second_moment_limit(none, none, none, config) == torch.inf
        still = torch.zeros(3)
        assert second_moment_limit(still, still, still + 1, config) == torch.inf
