"""Divergences: definitions, bounds, sets of ids, and log-probs at the end of the scale."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.objectives import Jsd, SkewForwardKl, SkewReverseKl
from megatron_opd.losses.cache import Cache
from megatron_opd.losses.divergences import DIVERGENCES, LOG_FLOOR, on_set
from megatron_opd.losses.objective import evaluate
from tests.support.figures import bounded
from tests.support.loss_cases import (
    cache_of,
    draw_rows,
    estimator,
    problem,
    student_logp,
    ungrouped_cache,
)
from tests.support.loss_oracles import divergence_term, exact, pull

DIRECT = [
    {"type": "sparse_reverse_kl"},
    {"type": "forward_kl"},
    {"type": "jsd", "beta": 0.3},
    {"type": "skew_forward_kl", "alpha": 0.2},
    {"type": "skew_reverse_kl", "alpha": 0.2},
]
KINDS = [tree["type"] for tree in DIRECT]
logps = st.floats(-30, -1e-6)


def objective_of(tree: dict[str, object]) -> object:
    return estimator(support={"type": "exact"}, objective=tree).objective


def tiny_cache(
    student: list[float], teacher: list[float], weight: list[float] | None = None
) -> Cache:
    """One token whose ids have these log-probs; the sampler is the teacher."""
    student_N = torch.tensor(student, dtype=torch.float64, requires_grad=True)
    teacher_N = torch.tensor(teacher, dtype=torch.float64)
    weight_N = torch.ones_like(teacher_N) if weight is None else torch.tensor(weight).double()
    zero = torch.zeros(1, dtype=torch.int64)
    return ungrouped_cache(
        student_logp_N=student_N,
        sampler_logp_N=teacher_N.clamp(min=-50.0),
        teacher_logp_N=teacher_N,
        weight_N=weight_N,
        row_N=torch.zeros(len(student), dtype=torch.int64),
        path_T=zero,
        sample_T=zero,
        num_samples=1,
    )


@pytest.mark.parametrize("tree", DIRECT, ids=KINDS)
@settings(deadline=None)
@given(p=logps, q=logps)
def test_value_and_pull_are_the_definitions(tree: dict[str, object], p: float, q: float):
    objective = objective_of(tree)
    chosen = DIVERGENCES[type(objective)](objective)
    log_p, log_q = (torch.tensor([x], dtype=torch.float64) for x in (p, q))
    value = float(divergence_term(objective, log_p.exp()[0], log_q.exp()[0]))
    drive = float(pull(objective, log_p.exp()[0], log_q.exp()[0]))
    # dropping a constant of the pull changes no gradient: sum_a p_a grad log p_a = 0
    one = torch.ones((), dtype=torch.float64)
    constant = chosen.balance - float(pull(objective, one, one))
    assert float(chosen.value(log_p, log_q)) == pytest.approx(value, rel=1e-9, abs=1e-15)
    shifted = float(chosen.pull(log_p, log_q))
    assert shifted - constant == pytest.approx(drive, rel=1e-9, abs=1e-9)
    assert float(chosen.pull(log_p, log_p)) == pytest.approx(chosen.balance, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tree", DIRECT, ids=KINDS)
def test_the_exact_support_gives_the_divergence_itself(tree: dict[str, object], seed: int):
    est, case = estimator(support={"type": "exact"}, objective=tree), problem(seed)
    rows = draw_rows(est.support, case, np.random.default_rng(0))
    logits = case.student_TV.clone().requires_grad_()
    result = evaluate(est, cache_of(est, case, rows, student_logp(logits, rows)))
    (gradient,) = torch.autograd.grad(result.loss_sum / result.count, logits)
    value, exact_gradient = exact(est.objective, case)
    bounded("exact support: value", abs(float(result.loss_sum) / result.count - value), 1e-12)
    bounded("exact support: gradient", (gradient - exact_gradient).abs().max(), 1e-12)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("tree", DIRECT, ids=KINDS)
def test_a_bucket_never_gives_more_than_the_whole_and_all_of_it_when_nothing_is_outside(
    tree: dict[str, object], seed: int
):
    """Joining actions loses information: the divergence of the joined distributions is smaller."""
    case = problem(seed, lengths=(1,), vocab=6, spread=2.0)
    objective = objective_of(tree)
    chosen = DIVERGENCES[type(objective)](objective)
    p_V, q_V = torch.log_softmax(case.student_TV[0], 0), case.teacher_TV[0]
    row_V = torch.zeros(6, dtype=torch.int64)
    whole = float(chosen.value(p_V, q_V).sum())
    last = 0.0
    for k in range(6):
        value = float(on_set(chosen, p_V[:k], q_V[:k], row_V[:k], 1, "bucket")[0])
        assert last - 1e-12 <= value <= whole + 1e-12
        last = value
    all_in = float(on_set(chosen, p_V, q_V, row_V, 1, "bucket")[0])
    assert all_in == pytest.approx(whole, abs=1e-6), "float32 cannot tell less from nothing"
    dropped = float(on_set(chosen, p_V, q_V, row_V, 1, "drop")[0])
    assert dropped == pytest.approx(whole, rel=1e-12)
    inside = [
        float(on_set(chosen, p_V[:k], q_V[:k], row_V[:k], 1, "renormalise")[0]) for k in (1, 6)
    ]
    assert inside == pytest.approx([0.0, whole], abs=1e-12)


def test_dropping_what_is_outside_can_go_below_zero_and_a_bucket_cannot():
    p = torch.tensor([0.2, 0.3]).double().log()
    q = torch.tensor([0.5, 0.4]).double().log()
    chosen = DIVERGENCES[type(objective_of(DIRECT[0]))](None)
    row = torch.zeros(2, dtype=torch.int64)
    assert float(on_set(chosen, p, q, row, 1, "drop")[0]) < -0.2
    assert float(on_set(chosen, p, q, row, 1, "bucket")[0]) > 0.1


@settings(deadline=None)
@given(st.lists(st.tuples(logps, logps), min_size=1, max_size=6))
def test_jsd_is_symmetric_at_one_half_and_within_log_two(pairs: list[tuple[float, float]]):
    p, q = (torch.log_softmax(torch.tensor(x).double(), 0) for x in zip(*pairs, strict=True))
    half = DIVERGENCES[Jsd](Jsd())
    value = float(half.value(p, q).sum())
    assert value == pytest.approx(float(half.value(q, p).sum()), abs=1e-12)
    assert -1e-12 <= value <= math.log(2) + 1e-12


def test_mixtures_tend_to_the_divergences_they_lie_between():
    case = problem(4, lengths=(1,))
    p, q = torch.log_softmax(case.student_TV[0], 0), case.teacher_TV[0]
    forward, backward = float((q.exp() * (q - p)).sum()), float((p.exp() * (p - q)).sum())
    near = 1e-7
    pairs = {
        "jsd": (DIVERGENCES[Jsd](Jsd(beta=near)), near * forward),
        "skew_forward_kl": (DIVERGENCES[SkewForwardKl](SkewForwardKl(alpha=near)), forward),
        "skew_reverse_kl": (DIVERGENCES[SkewReverseKl](SkewReverseKl(alpha=near)), backward),
    }
    for name, (chosen, limit) in pairs.items():
        assert float(chosen.value(p, q).sum()) == pytest.approx(limit, rel=1e-5), name


EXTREME: list[Estimator] = [
    *(
        estimator(support={"type": kind}, objective=tree | outside)
        for kind in ("topk", "teacher_topk")
        for tree in DIRECT
        for outside in ({}, {"outside": "bucket"}, {"outside": "drop"})
    ),
    *(estimator(support={"type": "exact"}, objective=tree) for tree in DIRECT),
    *(
        estimator(support={"type": kind}, objective=tree)
        for kind in ("mc", "path", "atoms_tail")
        for tree in [{"type": "reverse_kl"}, *DIRECT[1:]]
    ),
    *(estimator(support={"type": "teacher_mc"}, objective=DIRECT[i]) for i in (1, 3)),
]


@pytest.mark.parametrize("est", EXTREME, ids=lambda e: f"{e.objective.type}-{e.support.type}")
def test_unlikely_ids_stay_finite(est: Estimator):
    for student, teacher in itertools.product((-1e-7, -250.0, -1000.0), (-1.0, -1000.0, -math.inf)):
        cache = tiny_cache([student, -0.5, -1.5], [teacher, -0.7, -2.0], [0.2, 0.7, 0.1])
        result = evaluate(est, cache)
        result.loss_sum.backward()
        assert math.isfinite(float(result.loss_sum.detach()))
        assert cache.student_logp_N.grad is not None
        assert cache.student_logp_N.grad.isfinite().all()
        assert all(value.isfinite() for value in result.sums.values()), result.sums
        assert int(result.sums["excluded_ids"]) == int(teacher == -math.inf)


@pytest.mark.parametrize("student", [-10.0, -290.0, -310.0, -1000.0, -1e4])
@pytest.mark.parametrize(
    "tree",
    [
        {"support": {"type": "teacher_mc"}},
        {"support": {"type": "teacher_topk"}, "objective": {"outside": "drop"}},
        {"support": {"type": "teacher_topk"}, "objective": {"outside": "bucket"}},
        {"support": {"type": "exact"}},
        {"support": {"type": "mc"}},
        {"support": {"type": "mc"}, "correction": {"type": "importance", "prox": True}},
    ],
    ids=str,
)
def test_forward_kl_pulls_at_what_the_student_forbids(tree: dict, student: float):
    """The gradient of -q log p is -q however small p is: a floor must not stop it there.

    Sampler draws have -w (q / o - p / o), with q = o here.
    """
    objective = {"type": "forward_kl"} | tree.get("objective", {})
    est = Estimator.model_validate(tree | {"objective": objective})
    q = math.log(0.5)
    cache = tiny_cache([student, -0.01], [q, q], [0.5, 0.5])
    if est.applied_correction.prox:
        cache = replace(cache, prox_logp_N=cache.student_logp_N.detach() - 0.1)
    evaluate(est, cache).loss_sum.backward()
    grad_N = cache.student_logp_N.grad
    assert grad_N is not None
    assert float(grad_N[0]) == pytest.approx(-0.5, rel=1e-3)


def test_renormalising_a_set_the_student_forbids_is_exact():
    cache = tiny_cache([-2000.0, -2001.0], [-2.0, -1.0])
    est = estimator(support={"type": "topk"}, objective={"type": "sparse_reverse_kl"})
    likelier = 1 / (1 + math.exp(-1))  # p = (likelier, the rest), q the reverse
    expected = likelier - (1 - likelier)
    assert float(evaluate(est, cache).loss_sum.detach()) == pytest.approx(expected, rel=1e-12)
    assert LOG_FLOOR > -2000
