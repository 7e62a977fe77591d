"""Learner-sampler corrections: factors, identities between them, and whole responses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.config.corrections import (
    ImportanceCorrection,
    MaskedCorrection,
    NoCorrection,
    TruncatedCorrection,
)
from megatron_opd.losses.cache import Cache
from megatron_opd.losses.corrections import FACTORS, correct
from megatron_opd.losses.objective import evaluate
from tests.support.loss_cases import (
    accepted,
    cache_of,
    draw_rows,
    estimator,
    problem,
    student_logp,
    ungrouped_cache,
)

HUGE, TINY = 1e30, 1e-30
EVERY = 5  # of the accepted estimators: enough of each kind
PATH = {"type": "path"}


def outcome(est, cache: Cache) -> tuple[float, torch.Tensor]:
    """(loss, gradient with respect to the cached log-probs)."""
    leaf_N = cache.student_logp_N.detach().clone().requires_grad_()
    result = evaluate(est, replace(cache, student_logp_N=leaf_N))
    result.loss_sum.backward()
    assert leaf_N.grad is not None
    return float(result.loss_sum.detach()), leaf_N.grad


def made(est, seed: int = 0, **changes) -> Cache:
    case = problem(seed, lengths=(3, 2, 0, 4))
    rows = draw_rows(est.support, case, np.random.default_rng(seed))
    return replace(cache_of(est, case, rows, student_logp(case.student_TV, rows)), **changes)


@settings(deadline=None)
@given(st.floats(-20, 20), st.floats(0.01, 10), st.floats(0.01, 10))
def test_factors_are_their_definitions(log_rho: float, one: float, other: float):
    low, high = sorted((one, other))
    x = torch.tensor([log_rho], dtype=torch.float64)
    rho = math.exp(log_rho)

    def factor(config) -> float:
        return float(FACTORS[type(config)](config, x))

    assert factor(NoCorrection()) == 1
    assert factor(ImportanceCorrection()) == pytest.approx(rho)
    assert factor(TruncatedCorrection(max_ratio=high)) == pytest.approx(min(rho, high))
    assert factor(TruncatedCorrection(max_ratio=1.0)) <= 1
    masked = factor(MaskedCorrection(min_ratio=low, max_ratio=high))
    near_an_edge = min(abs(rho / low - 1), abs(rho / high - 1)) < 1e-9
    assert near_an_edge or masked == pytest.approx(rho if low < rho < high else 0)
    assert factor(MaskedCorrection(min_ratio=0.0, max_ratio=HUGE)) == pytest.approx(rho)


def test_without_a_bound_every_correction_is_importance():
    """C = inf, a mask that lets all pass, and each with prox: one and the same gradient."""
    compared = 0
    for est in accepted()[::EVERY]:
        applied = est.applied_correction
        if applied.type not in ("truncated", "masked"):
            continue
        edges = {"max_ratio": HUGE} | ({"min_ratio": TINY} if applied.type == "masked" else {})
        wide = est.model_copy(update={"correction": applied.model_copy(update=edges)})
        plain = ImportanceCorrection(prox=applied.prox, level=applied.level)
        full = est.model_copy(update={"correction": plain})
        cache = made(est)
        (a, grad_a), (b, grad_b) = outcome(wide, cache), outcome(full, cache)
        torch.testing.assert_close(grad_a, grad_b, rtol=1e-12, atol=1e-12)
        if applied.prox or applied.level != "token":
            # else the one ratio is kept whole in importance and detached here
            assert a == pytest.approx(b, rel=1e-12, abs=1e-12)
        compared += 1
    assert compared > 50


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_cap_of_one_bounds_every_weight(level: str):
    est = estimator(
        support=PATH, correction={"type": "truncated", "max_ratio": 1.0, "level": level}
    )
    loose = estimator(support=PATH, correction={"type": "importance", "level": level})
    cut, largest = 0, 0.0
    for seed in range(5):
        term = evaluate(est, made(est, seed)).terms[0]
        assert float(term.importance_n.max()) <= 1 + 1e-15
        cut += int(term.cut_n.sum())
        largest = max(
            largest, float(evaluate(loose, made(loose, seed)).terms[0].importance_n.max())
        )
    assert cut > 0
    assert largest > 1.1


def test_prox_at_the_learner_itself_is_plain_ppo_with_the_factor_in_front():
    """prox == current: the trust ratio is 1, so clip and no clip agree; the value is -w kappa A."""
    for kind in ("importance", "truncated", "masked", "none"):
        clip = estimator(
            objective={"trust": {"type": "clip"}}, correction={"type": kind, "prox": True}
        )
        free = estimator(correction={"type": kind, "prox": True})
        own = made(clip).student_logp_N.detach()
        cache = made(clip, prox_logp_N=own)
        (a, grad_a), (b, grad_b) = outcome(clip, cache), outcome(free, cache)
        assert a == b
        torch.testing.assert_close(grad_a, grad_b, rtol=0, atol=1e-15)
        hit_N = cache.weight_N > 0
        advantage_N = cache.teacher_logp_N - own
        rho_N = FACTORS[type(clip.applied_correction)](
            clip.applied_correction, own - cache.sampler_logp_N
        )
        expected_N = torch.where(hit_N, -cache.weight_N * rho_N * advantage_N, 0.0)
        torch.testing.assert_close(grad_a, expected_N)


def test_with_prox_the_sampler_taken_for_the_learner_is_textbook_ppo():
    """correction none + prox: PPO on p / p0 whatever the sampler was."""
    est = estimator(
        support=PATH,
        objective={"type": "ppo", "trust": {"type": "clip"}},
        correction={"type": "none", "prox": True},
    )
    cache = made(est)
    other = replace(cache, sampler_logp_N=cache.sampler_logp_N - 1.0)
    assert outcome(est, cache)[0] == outcome(est, other)[0]
    same = replace(cache, sampler_logp_N=cache.prox_logp_N)
    joined = estimator(support=PATH, objective={"type": "ppo", "trust": {"type": "clip"}})
    (a, grad_a), (b, grad_b) = outcome(est, cache), outcome(joined, same)
    assert a == pytest.approx(b, rel=1e-14)
    torch.testing.assert_close(grad_a, grad_b)


@pytest.mark.parametrize("prox", [False, True])
def test_one_token_responses_have_one_level(prox: bool):
    case = problem(5, lengths=(1, 1, 1, 1))
    losses = []
    for level in ("token", "sequence", "geometric"):
        est = estimator(
            support=PATH,
            objective={"type": "reinforce"},
            correction={"type": "truncated", "max_ratio": 1.1, "level": level, "prox": prox},
        )
        rows = draw_rows(est.support, case, np.random.default_rng(0))
        losses.append(outcome(est, cache_of(est, case, rows, student_logp(case.student_TV, rows))))
    for value, gradient in losses[1:]:
        assert value == pytest.approx(losses[0][0], rel=1e-14)
        torch.testing.assert_close(gradient, losses[0][1])


def test_a_response_ratio_counts_tokens_that_the_teacher_excludes():
    """-inf scores leave the loss, not the probability of the response."""
    est = estimator(support=PATH, correction={"type": "importance", "level": "sequence"})
    cache = made(est)
    scores_N = cache.teacher_logp_N.clone()
    scores_N[0] = -math.inf
    term = evaluate(est, replace(cache, teacher_logp_N=scores_N)).terms[0]
    path_T = (cache.student_logp_N - cache.sampler_logp_N)[:3]
    assert float(term.importance_n[0]) == pytest.approx(math.exp(float(path_T.sum())))


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize("kind", ["importance", "truncated", "masked"])
@pytest.mark.parametrize("shift", [-2.0, 2.0])
def test_a_response_of_30000_tokens_stays_finite(level: str, kind: str, shift: float):
    tokens = 30_000
    est = estimator(
        support=PATH,
        objective={"type": "reinforce"},
        correction={"type": kind, "level": level},
    )
    student_N = torch.full((tokens,), -3.0, dtype=torch.float32, requires_grad=True)
    index_T = torch.arange(tokens)
    cache = ungrouped_cache(
        student_logp_N=student_N,
        sampler_logp_N=torch.full((tokens,), -3.0 - shift),
        teacher_logp_N=torch.full((tokens,), math.nan),
        weight_N=torch.ones(tokens),
        row_N=index_T,
        path_T=index_T,
        sample_T=torch.zeros_like(index_T),
        num_samples=1,
        advantage_B=torch.tensor([0.5]).double(),
    )
    result = evaluate(est, cache)
    (result.loss_sum / result.count).backward()
    assert math.isfinite(float(result.loss_sum.detach()))
    assert student_N.grad is not None
    assert student_N.grad.isfinite().all()
    factor = float(result.terms[0].importance_n[0])
    if level == "geometric" and kind == "importance":
        assert factor == pytest.approx(math.exp(shift))
    if level == "sequence":
        assert (factor > 1) == (shift > 0 and kind != "masked")


def test_levels_read_the_path_and_not_other_cached_actions():
    """At token level every action has its own ratio, deduplicated or not."""
    est = estimator(support={"type": "mc", "m": 3}, correction={"type": "truncated"})
    cache = made(est)
    chosen = cache.selected()
    weighed = correct(est.applied_correction, chosen, cache)
    expected_n = (chosen.student_n - chosen.sampler_n).exp().clamp(max=2.0)
    torch.testing.assert_close(weighed.factor_n, expected_n.detach())
    assert int(weighed.cut_n.sum()) == int((expected_n == 2.0).sum())
