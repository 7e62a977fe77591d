"""Which estimators are unbiased, exactly; and the bias of the others, shown and not hidden.

Expectations enumerate every draw of a small vocabulary (tests/support/loss_expectations.py):
differences of 1e-12 are errors and need no statistics. One z-test follows with a large vocabulary
and m = 64.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_opd.config.estimator import Estimator
from megatron_opd.losses.biases import bias_of
from megatron_opd.losses.objective import evaluate
from tests.support.figures import bounded
from tests.support.loss_cases import (
    Problem,
    Row,
    cache_of,
    draw_rows,
    estimator,
    flat,
    problem,
    student_logp,
)
from tests.support.loss_expectations import (
    Outcomes,
    expectation,
    expected_group,
    outcomes,
    policy_gradient,
    repeated,
    worth,
)
from tests.support.loss_oracles import exact

REVERSE = {"type": "reverse_kl"}
SAMPLED: list[dict] = [
    REVERSE,
    {"type": "forward_kl"},
    {"type": "jsd", "beta": 0.3},
    {"type": "skew_forward_kl", "alpha": 0.2},
    {"type": "skew_reverse_kl", "alpha": 0.2},
]
COVERING: list[dict] = [
    {"type": "path"},
    {"type": "mc", "m": 1},
    {"type": "mc", "m": 3},
    {"type": "atoms_tail", "k": 1, "m": 3},
    {"type": "atoms_tail", "k": 2, "m": 2},
    {"type": "atoms_tail", "k": 4, "m": 2},
]
UNBIASED: list[Estimator] = [
    *(
        estimator(support=support, objective=objective, correction=correction)
        for support in COVERING
        for objective in SAMPLED
        for correction in (None, {"type": "importance", "prox": True})
    ),
    estimator(support={"type": "exact"}, objective=REVERSE),
    *(
        estimator(support={"type": "teacher_mc", "m": m}, objective=objective)
        for m in (1, 3)
        for objective in (SAMPLED[1], SAMPLED[3])
    ),
    *(estimator(support={"type": "exact"}, objective=objective) for objective in SAMPLED[1:]),
]


def name_of(est: Estimator) -> str:
    return f"{est.objective.type}-{est.support.type}-prox{est.applied_correction.prox}"


def one(seed: int = 0, spread: float = 0.7) -> Problem:
    return problem(seed, lengths=(1,), vocab=4, spread=spread)


def difference(
    est: Estimator, case: Problem, cached: Outcomes | None = None
) -> tuple[float, float]:
    """(value, largest gradient component) of the estimator's expectation minus the truth."""
    value, gradient = expectation(est, case, cached)
    exact_value, exact_gradient = exact(est.objective, case)
    return value - exact_value, float((gradient - exact_gradient).abs().max())


@pytest.mark.parametrize("est", UNBIASED, ids=name_of)
def test_unbiased_in_value_and_gradient(est: Estimator):
    assert bias_of(est.objectives[0], est).startswith("none")
    for seed in range(2):
        value, gradient = difference(est, one(seed))
        bounded("expectation over all caches: value", abs(value), 1e-12)
        bounded("expectation over all caches: gradient", gradient, 1e-12)


def without(logp_TV: torch.Tensor, action: int) -> torch.Tensor:
    """The same distribution, renormalised, but for one action that it forbids."""
    masked_TV = logp_TV.clone()
    masked_TV[:, action] = -torch.inf
    return torch.log_softmax(masked_TV, -1)


def possible(est: Estimator, case: Problem) -> Outcomes:
    return [(chance, row) for chance, row in outcomes(est.support, case) if chance > 0]


@pytest.mark.parametrize("objective", [SAMPLED[1], SAMPLED[3]], ids=lambda o: o["type"])
@pytest.mark.parametrize("action", range(4))
def test_draws_of_a_teacher_need_not_cover_the_student_but_draws_of_the_sampler_the_teacher(
    objective: dict, action: int
):
    """A forward KL has no share in what q forbids; what o forbids, its draws can never show."""
    case = one(1)
    blind = replace(case, teacher_TV=without(case.teacher_TV, action))
    for m in (1, 3):
        est = estimator(support={"type": "teacher_mc", "m": m}, objective=objective)
        assert bias_of(est.objectives[0], est) == "none, whatever q covers"
        cached = possible(est, blind)
        assert all(action not in row for _, row in cached)
        value, gradient = difference(est, blind, cached)
        bounded("expectation over all caches: value", abs(value), 1e-12)
        bounded("expectation over all caches: gradient", gradient, 1e-12)
    drawn = estimator(support={"type": "mc", "m": 2}, objective=objective)
    assert bias_of(drawn.objectives[0], drawn) == "none where o covers p and q"
    case = replace(case, sampler_TV=without(case.sampler_TV, action))
    assert difference(drawn, case, possible(drawn, case))[1] > 1e-3


# --- wrong variants, which the proof above must be able to see ----------------------------------


def test_the_proof_sees_caches_that_are_wrong():
    case = one()
    mc, tail = UNBIASED[20], estimator(support={"type": "atoms_tail", "k": 1, "m": 2})
    assert (mc.support.type, mc.objective.type) == ("mc", "reverse_kl")
    good = outcomes(mc.support, case)
    undivided = [(chance, {a: w * 3 for a, w in row.items()}) for chance, row in good]
    assert difference(mc, case, undivided)[1] > 1e-2

    probs = case.sampler_TV[0].exp().tolist()
    atom = max(range(4), key=probs.__getitem__)
    redrawn: Outcomes = []  # the tail's draws taken from the whole distribution
    for a, p in enumerate(probs):
        row = {atom: probs[atom]}
        row[a] = row.get(a, 0.0) + 1 - probs[atom]
        redrawn.append((p, row))
    assert difference(tail, case, redrawn)[1] > 1e-2
    unweighed = [(c, dict.fromkeys(row, 1 / len(row))) for c, row in good]
    assert difference(mc, case, unweighed)[1] > 1e-3


def test_the_proof_sees_a_missing_ratio_and_a_shifted_row():
    case = one()
    no_ratio = estimator(support={"type": "mc", "m": 2}, correction={"type": "none"})
    assert difference(no_ratio, case)[1] > 1e-2
    shifted = replace(case, teacher_TV=one(1).teacher_TV)
    value, gradient = expectation(estimator(support={"type": "mc", "m": 2}), shifted)
    exact_value, exact_gradient = exact(no_ratio.objective, case)
    assert abs(value - exact_value) > 1e-2
    assert float((gradient - exact_gradient).abs().max()) > 1e-2


# --- stated biases of the gradient, each against its own formula --------------------------------


def weighed_gradient(case: Problem, weight_V: torch.Tensor, advantage_V: torch.Tensor):
    """-sum_a weight_a A_a grad log p_a, with respect to the logits."""
    leaf = case.student_TV.clone().requires_grad_()
    log_p_V = torch.log_softmax(leaf[0], 0)
    (gradient,) = torch.autograd.grad(-(weight_V * advantage_V * log_p_V).sum(), leaf)
    return gradient


def parts(case: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """p, o, q, A of the one token."""
    log_p = torch.log_softmax(case.student_TV[0], 0)
    log_o, log_q = case.sampler_TV[0], case.teacher_TV[0]
    return log_p.exp(), log_o.exp(), log_q.exp(), log_q - log_p


def check_bias(est: Estimator, case: Problem, formula: torch.Tensor) -> None:
    _, gradient = expectation(est, case)
    torch.testing.assert_close(gradient, formula, rtol=1e-10, atol=1e-12)
    assert float((formula - exact(est.objective, case)[1]).abs().max()) > 1e-3, "no bias to show"
    assert not bias_of(est.objectives[0], est).startswith("none")


@pytest.mark.parametrize("support", COVERING[:5], ids=lambda s: s["type"])
@pytest.mark.parametrize("prox", [False, True])
def test_truncated_masked_and_missing_ratios_have_the_bias_of_what_they_cut(
    support: dict, prox: bool
):
    case = one(2)
    p, o, _, A = parts(case)
    upper = case.prox_TV[0].exp() if prox else p
    behind = p / upper  # the trust ratio
    rho = upper / o

    def made(**correction) -> Estimator:
        return estimator(support=support, correction=correction | {"prox": prox})

    cap = 1.05
    check_bias(
        made(type="truncated", max_ratio=cap),
        case,
        weighed_gradient(case, o * rho.clamp(max=cap) * behind, A),
    )
    inside = (rho >= 0.7) & (rho <= 1.3)
    assert 0 < int(inside.sum()) < 4
    masked = made(type="masked", min_ratio=0.7, max_ratio=1.3)
    check_bias(masked, case, weighed_gradient(case, torch.where(inside, o * rho, 0.0) * behind, A))
    check_bias(made(type="none"), case, weighed_gradient(case, o * behind, A))
    kept = float((o * rho.clamp(max=cap)).sum())
    assert kept < 1, "truncation only ever takes weight away"


def test_the_rollout_advantage_lacks_the_gradient_of_the_divergence_from_the_sampler():
    """AsyncOPD Eq. 6: grad KL(p || q) - grad KL(p || o)."""
    case = one(3)
    est = estimator(support={"type": "mc", "m": 2}, objective=REVERSE | {"advantage": "rollout"})
    from_sampler = exact(est.objective, replace(case, teacher_TV=case.sampler_TV))[1]
    check_bias(est, case, exact(est.objective, case)[1] - from_sampler)


def test_reweighted_top_k_misses_what_is_outside_its_set():
    """-sum over the set of p A grad log p: one reading of the paper's "Top-k + RW"."""
    case = one(4)
    p, o, _, A = parts(case)
    inside = torch.zeros(4, dtype=torch.bool)
    inside[o.topk(2).indices] = True
    est = estimator(support={"type": "topk", "k": 2})
    check_bias(est, case, weighed_gradient(case, torch.where(inside, p, 0.0), A))


def test_renormalised_top_k_is_the_restricted_divergence_itself():
    """AsyncOPD Eq. 9-10: value and gradient of KL(p~ || q~) on the sampler's set, and its bias."""
    for seed in (4, 5, 6):
        case = one(seed)
        policy = estimator(
            support={"type": "topk", "k": 2}, objective=REVERSE | {"outside": "renormalise"}
        )
        value, gradient = expectation(policy, case)
        leaf = case.student_TV.clone().requires_grad_()
        inside = case.sampler_TV[0].topk(2).indices
        log_p = torch.log_softmax(torch.log_softmax(leaf[0], 0)[inside], 0)
        log_q = torch.log_softmax(case.teacher_TV[0][inside], 0)
        restricted = (log_p.exp() * (log_p - log_q)).sum()
        (truth,) = torch.autograd.grad(restricted, leaf)
        error = abs(value - float(restricted.detach()))
        bounded("renormalised top-k: value against Eq. 10", error, 1e-12)
        slope = (gradient - truth).abs().max()
        bounded("renormalised top-k: gradient against Eq. 10", slope, 1e-12)
        assert float((truth - exact(policy.objective, case)[1]).abs().max()) > 1e-3, "no bias"
        assert "blind" in bias_of(policy.objectives[0], policy)
        dropped, _ = expectation(estimator(support={"type": "topk", "k": 2}), case)
        assert abs(dropped - value) > 1e-3, "the other reading is another number"


@pytest.mark.parametrize("kind", ["topk", "teacher_topk"])
@pytest.mark.parametrize("outside", ["renormalise", "bucket", "drop"])
@pytest.mark.parametrize("objective", ["sparse_reverse_kl", "forward_kl"])
def test_sets_are_biased_by_what_is_outside(kind: str, outside: str, objective: str):
    case = one(5)
    est = estimator(
        support={"type": kind, "k": 2}, objective={"type": objective, "outside": outside}
    )
    value, gradient = difference(est, case)
    assert gradient > 1e-3
    assert not bias_of(est.objectives[0], est).startswith("none")
    if outside == "bucket":
        assert value < -1e-4, "joined actions differ less"


@pytest.mark.parametrize("objective", ["sparse_reverse_kl", "forward_kl"])
def test_a_dropped_outside_moves_mass_even_at_the_goal(objective: str):
    """At p = q the gradient is that of the set's mass: +1 for reverse, -1 for forward KL."""
    case = one(6)
    goal = replace(case, student_TV=case.teacher_TV)
    est = estimator(
        support={"type": "topk", "k": 2}, objective={"type": objective, "outside": "drop"}
    )
    _, gradient = expectation(est, goal)
    leaf = goal.student_TV.clone().requires_grad_()
    inside = torch.softmax(leaf[0], 0)[case.sampler_TV[0].topk(2).indices].sum()
    (of_mass,) = torch.autograd.grad(inside, leaf)
    sign = 1 if objective == "sparse_reverse_kl" else -1
    torch.testing.assert_close(gradient, sign * of_mass)


def test_clipping_gives_a_pessimistic_surrogate_and_a_biased_gradient():
    case = one(7)
    free = estimator(support={"type": "mc", "m": 2})
    clip = estimator(
        support={"type": "mc", "m": 2},
        objective=REVERSE | {"trust": {"type": "clip", "low": 0.1, "high": 0.1}},
    )
    assert expectation(clip, case)[0] > expectation(free, case)[0] + 1e-4
    assert difference(clip, case)[1] > 1e-3
    assert "clipped" in bias_of(clip.objectives[0], clip)


# --- rewards: whole responses ---------------------------------------------------------------


def of_rewards(advantage: str, level: str = "sequence", kind: str = "reinforce") -> Estimator:
    return estimator(
        support={"type": "path"},
        objective={"type": kind, "advantage": advantage, "trust": {"type": "none"}},
        correction={"type": "importance", "level": level},
        reduction={"type": "fixed_length", "length": 1},
    )


def test_a_sequence_ratio_makes_reinforce_unbiased_and_a_token_ratio_does_not():
    case = problem(8, lengths=(2,), vocab=3)
    truth = policy_gradient(case, worth)
    got, mass = expected_group(of_rewards("reward"), case, 1, worth)
    assert mass == pytest.approx(1)
    bounded("REINFORCE, sequence ratio, all responses: gradient", (got - truth).abs().max(), 1e-12)
    for level in ("token", "geometric"):
        est = of_rewards("reward", level)
        biased, _ = expected_group(est, case, 1, worth)
        assert float((biased - truth).abs().max()) > 1e-2
        assert not bias_of(est.objectives[0], est).startswith("none")


def test_leave_one_out_is_unbiased_and_the_group_mean_shrinks_the_gradient():
    case = problem(9, lengths=(1,), vocab=3)
    truth = policy_gradient(case, worth)
    loo, _ = expected_group(of_rewards("leave_one_out"), case, 2, worth)
    torch.testing.assert_close(loo, truth, rtol=1e-10, atol=1e-12)
    mean, _ = expected_group(of_rewards("group_mean"), case, 2, worth)
    torch.testing.assert_close(mean, truth / 2, rtol=1e-10, atol=1e-12)
    std, _ = expected_group(of_rewards("group_std"), case, 2, worth)
    assert float((std - truth).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["gspo", "gepo"])
def test_gspo_and_gepo_are_biased(kind: str):
    case = problem(10, lengths=(2,), vocab=3)
    est = of_rewards("reward", "token", kind)
    got, _ = expected_group(est, case, 2, worth)
    truth = policy_gradient(case, worth)
    cosine = float((got * truth).sum() / (got.norm() * truth.norm()))
    assert 0.3 < cosine < 1 - 1e-3
    assert not bias_of(est.objectives[0], est).startswith("none")


# --- what the metrics say ----------------------------------------------------------------------


def path_means(case: Problem) -> dict[str, float]:
    """Diagnostics, mean over the sampler's tokens, each outcome enumerated."""
    est = estimator(support={"type": "path"}, correction={"type": "importance", "prox": True})
    found: dict[str, float] = {}
    for chance, row in outcomes(est.support, case):
        there = repeated(case, [row])
        sums = evaluate(est, cache_of(est, there, [row], student_logp(case.student_TV, [row]))).sums
        for key, value in sums.items():
            found[key] = found.get(key, 0.0) + chance * float(value)
    return found


def test_k1_between_prox_and_current_is_biased_by_the_sampler_and_its_weighed_form_is_not():
    """TIS, the case study on KL estimation: k1 on tokens of o can be negative."""
    signs = set()
    for seed in range(12):
        case = one(seed, spread=1.0)
        found = path_means(case)
        p, o, log_p0 = *parts(case)[:2], case.prox_TV[0]
        truth = float((log_p0.exp() * (log_p0 - p.log())).sum())
        assert found["prox_k1_weighed"] == pytest.approx(truth, rel=1e-10)
        assert abs(found["prox_k1"] - truth) > 1e-4
        signs.add(found["prox_k1"] > 0)
        kl = float((o * (o.log() - p.log())).sum())
        assert found["k1"] == pytest.approx(kl, rel=1e-10)
        assert found["k3"] == pytest.approx(kl, rel=1e-10)
        assert abs(found["k2"] - kl) > 1e-4
        assert found["reverse_kl"] == pytest.approx(exact(UNBIASED[0].objective, case)[0])
    assert signs == {True, False}, "k1 must be seen below zero, where no divergence is"


@pytest.mark.parametrize("kind", ["none", "importance", "truncated"])
def test_the_correction_and_the_trust_ratio_are_reported_apart(kind: str):
    """With prox and a second step: kappa is of the sampler alone, r of the student's own step."""
    case = one(3)
    est = estimator(support={"type": "path"}, correction={"type": kind, "prox": True})
    sums: dict[str, float] = {}
    for chance, row in outcomes(est.support, case):
        there = repeated(case, [row])
        cache = cache_of(est, there, [row], student_logp(case.student_TV, [row]))
        for key, value in evaluate(est, cache).sums.items():
            sums[key] = sums.get(key, 0.0) + chance * float(value)
    p, o, _, _ = parts(case)
    p0 = case.prox_TV[0].exp()
    kappa = {"none": p0 / p0, "importance": p0 / o, "truncated": (p0 / o).clamp(max=2.0)}[kind]
    for name, factor in (("correction", kappa), ("trust", p / p0), ("importance", kappa * p / p0)):
        assert sums[name] == pytest.approx(float((o * factor).sum()), rel=1e-12), name
        assert sums[f"{name}_squared"] == pytest.approx(float((o * factor**2).sum()), rel=1e-12)
    spread = sums["correction_squared"] - sums["correction"] ** 2
    assert (abs(spread) < 1e-12) == (kind == "none"), "nothing of the sampler is in the weight"
    assert sums["trust_squared"] - sums["trust"] ** 2 > 1e-3, "the student's own step"
    start = float((o * (o / p0).log()).sum())
    assert sums["start_k1"] == pytest.approx(start, rel=1e-10)
    assert sums["start_k3"] == pytest.approx(start, rel=1e-10)


# --- many random caches of realistic size -------------------------------------------------------


def z_score(est: Estimator, vocab: int, count: int, ratio_of: str = "sampler") -> float:
    """Of the gradient along the true one, over `count` caches of one token."""
    case = problem(11, lengths=(1,), vocab=vocab, spread=0.4)
    given = replace(case, sampler_TV=torch.log_softmax(case.student_TV, -1))
    drawn: list[Row] = draw_rows(
        est.support, repeated(case, [{0: 0.0}] * count), np.random.default_rng(5)
    )
    wide = repeated(case if ratio_of == "sampler" else given, drawn)
    logits = case.student_TV.repeat(count, 1).requires_grad_()
    loss = evaluate(est, cache_of(est, wide, drawn, student_logp(logits, drawn))).loss_sum
    (gradient_TV,) = torch.autograd.grad(loss, logits)
    truth = exact(est.objective, case)[1][0]
    along_T = gradient_TV @ truth / truth.norm()
    error = float(along_T.mean() - truth.norm())
    return error / (float(along_T.std()) / math.sqrt(count))


@pytest.mark.parametrize(
    "support",
    [{"type": "mc", "m": 64}, {"type": "atoms_tail", "k": 16, "m": 48}],
    ids=lambda s: s["type"],
)
def test_caches_of_64_draws_are_unbiased_by_a_z_test(support: dict):
    """|z| < 5.5 by chance but for 4e-8; the ratio left out shows at once."""
    est = estimator(support=support)
    z = z_score(est, vocab=60, count=600)
    bounded("z of 600 random caches", abs(z), 5.5)
    assert abs(z_score(est, vocab=60, count=600, ratio_of="nothing")) > 6.5


def test_rows_of_a_cache_are_what_draws_must_be():
    """The caches of these tests: ids rise, weights of a covering row sum to 1."""
    case = problem(12)
    for support in COVERING:
        rows = draw_rows(estimator(support=support).support, case, np.random.default_rng(0))
        row_N, id_N, weight_N = flat(rows)
        sums_T = torch.zeros(len(rows), dtype=torch.float64).index_add(0, row_N, weight_N)
        torch.testing.assert_close(sums_T, torch.ones_like(sums_T))
        assert all(list(row) for row in rows)
        inside = row_N[1:] == row_N[:-1]
        assert bool((id_N[1:] > id_N[:-1])[inside].all())
