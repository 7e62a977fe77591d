"""Objectives from rewards: GRPO, GSPO, GEPO and their limits; long responses; mixtures."""

import itertools
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from megatron_opd.batching.advantages import columns_of, log_group_expectation
from megatron_opd.losses.cache import Cache
from megatron_opd.losses.objective import evaluate
from tests.support.figures import bounded
from tests.support.loss_cases import cache_of, draw_rows, estimator, problem, student_logp

FREE = {"type": "none"}
ROWS_PER = {"type": "sequence_mean"}


def reward(kind: str, **changes):
    correction = changes.pop("correction", None)
    tree = {"support": {"type": "path"}, "objective": {"type": kind} | changes}
    return estimator(**tree, correction=correction, reduction=ROWS_PER)


def run(est, case, **columns) -> tuple[float, torch.Tensor]:
    rows = draw_rows(est.support, case, np.random.default_rng(0))
    logits = case.student_TV.clone().requires_grad_()
    cache = cache_of(est, case, rows, student_logp(logits, rows))
    result = evaluate(est, Cache(**(vars(cache) | columns)))
    (gradient,) = torch.autograd.grad(result.loss_sum / result.count, logits)
    return float(result.loss_sum.detach() / result.count), gradient


def same(one, other, rtol: float = 1e-12) -> None:
    assert one[0] == pytest.approx(other[0], rel=rtol, abs=1e-14)
    torch.testing.assert_close(one[1], other[1], rtol=rtol, atol=1e-14)


@pytest.mark.parametrize(
    "trust", [FREE, {"type": "clip"}, {"type": "clip", "low": 0.1, "high": 0.1, "dual": 1.2}]
)
def test_gspo_on_responses_of_one_token_is_grpo(trust: dict):
    case = problem(1, lengths=(1, 1, 1, 1))
    same(run(reward("gspo", trust=trust), case), run(reward("grpo", trust=trust), case))
    longer = problem(1, lengths=(2, 1, 3, 1))
    different = run(reward("gspo", trust=trust), longer), run(reward("grpo", trust=trust), longer)
    assert abs(different[0][0] - different[1][0]) > 1e-4


def test_gepo_with_equal_sampler_probabilities_is_gspo():
    """E_q[q] = q when all q of a group are equal: w = p / q (GEPO Eq. 10, 12)."""
    case = problem(2, lengths=(2, 2, 2, 2))
    rows_T = torch.full_like(case.sampler_TV, -math.log(case.vocab))
    flat = type(case)(**(vars(case) | {"sampler_TV": rows_T}))
    options = {"trust": FREE, "advantage": "group_mean"}
    same(run(reward("gepo", **options), flat), run(reward("gspo", **options), flat))
    own, other = run(reward("gepo", **options), case), run(reward("gspo", **options), case)
    assert abs(own[0] - other[0]) > 1e-4


def test_gepo_in_groups_of_one_is_gspo():
    case = type(problem(3))(**(vars(problem(3)) | {"group_size": 1}))
    options = {"trust": FREE, "advantage": "reward"}
    same(run(reward("gepo", **options), case), run(reward("gspo", **options), case))


def test_gepo_with_eps_one_is_the_plain_policy_gradient():
    """Eq. 15 with eps = 1: w = p(y) / sg(p(y)), gradient A mean_t grad log p_t."""
    case = problem(4, lengths=(2, 1, 3, 4))
    options = {"trust": FREE, "advantage": "group_mean"}
    ones_B = torch.ones(4, dtype=torch.float64)
    gepo = run(reward("gepo", **options), case, defensive_B=ones_B)
    plain = run(reward("reinforce", **options, correction={"type": "none"}), case)
    same(gepo, plain)
    less = run(reward("gepo", **options), case, defensive_B=ones_B * 0.5)
    assert float((less[1] - plain[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["gspo", "gepo"])
@pytest.mark.parametrize("trust", [FREE, {"type": "clip"}])
@pytest.mark.parametrize("shift", [-1.0, -1e-3, 0.0, 1e-3, 1.0])
@pytest.mark.parametrize("level", [-1e-3, -4.0, -100.0])
def test_weights_of_30000_token_responses_are_exact(
    kind: str, trust: dict, shift: float, level: float
):
    """Against 50 digits, where products of 30,000 probabilities (1e-52000) are plain numbers."""
    tokens = 30_000
    q = np.array([level, level * 1.001])
    est = reward(kind, trust=trust, advantage="reward")
    group_B = np.zeros(2, dtype=np.int64)
    columns = columns_of(est, np.array([1.0, -0.5]), q, group_B)
    index_T, sample_T = torch.arange(2 * tokens), torch.arange(2).repeat_interleave(tokens)
    sampler_N = torch.tensor(q)[sample_T]
    student_N = (sampler_N + shift).float().requires_grad_()
    cache = Cache(
        student_logp_N=student_N,
        sampler_logp_N=sampler_N,
        teacher_logp_N=torch.full_like(sampler_N, math.nan),
        weight_N=torch.ones_like(sampler_N),
        row_N=index_T,
        path_T=index_T,
        sample_T=sample_T,
        advantage_B=torch.tensor(columns.advantage_B),
        group_log_q_B=torch.tensor(columns.group_log_q_B),
        defensive_B=torch.tensor(columns.defensive_B),
        reward_weight_B=torch.tensor(columns.reward_weight_B),
        teacher_weight_B=torch.tensor(columns.teacher_weight_B),
        imitation_weight_B=torch.tensor(columns.imitation_weight_B),
        share_B=torch.tensor(columns.share_B),
    )
    result = evaluate(est, cache)
    result.loss_sum.backward()
    assert student_N.grad is not None
    assert student_N.grad.isfinite().all()
    got = result.terms[0].importance_n[[0, tokens]].tolist()
    with localcontext() as context:
        context.prec, context.Emin = 50, -(10**9)
        p = [
            ((Decimal(float(student_N[i * tokens].detach())) * tokens).exp())
            ** (Decimal(1) / tokens)
            for i in range(2)
        ]
        probs = [(Decimal(float(x)) * tokens).exp() ** (Decimal(1) / tokens) for x in q]
        expected = sum(x * x for x in probs) / sum(probs)
        below = probs if kind == "gspo" else [expected, expected]
        exact = [float(x / y) for x, y in zip(p, below, strict=True)]
    for ours, true in zip(got, exact, strict=True):
        bounded("GSPO and GEPO weights, 30,000 tokens, relative", abs(ours / true - 1), 1e-9)


def test_group_expectation_of_one_likely_and_many_unlikely_responses():
    logq = np.array([-1e-3, -500.0, -1000.0])
    got = log_group_expectation(logq, np.zeros(3, dtype=np.int64))
    assert got == pytest.approx([-1e-3] * 3)


def test_a_mixture_is_the_weighted_sum_of_its_terms():
    """Values and gradients are linear in the terms, whatever the support and the trust regions."""
    opd = [{"type": "reverse_kl"}, {"type": "forward_kl"}, {"type": "jsd"}]
    rl = [{"type": "grpo"}, {"type": "gspo"}, {"type": "gepo"}]
    for first, second in itertools.product(opd, rl):
        case = problem(8)

        def of(objective: dict, case=case):
            est = estimator(support={"type": "path"}, objective=objective, reduction=ROWS_PER)
            return run(est, case)

        terms = [
            {"coefficient": 0.3, "objective": first},
            {"coefficient": 2.0, "objective": second},
        ]
        value, gradient = of({"type": "mixture", "terms": terms})
        (a, grad_a), (b, grad_b) = of(first), of(second)
        assert value == pytest.approx(0.3 * a + 2.0 * b, rel=1e-12)
        torch.testing.assert_close(gradient, 0.3 * grad_a + 2.0 * grad_b)
