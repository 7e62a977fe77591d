"""Every accepted estimator against the float64 oracles."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.config.estimator import Estimator
from megatron_opd.losses.objective import evaluate
from tests.support.figures import bounded
from tests.support.loss_cases import (
    Problem,
    Row,
    accepted,
    by_turn,
    cache_of,
    draw_rows,
    estimator,
    problem,
    student_logp,
    ungrouped_cache,
)
from tests.support.loss_oracles import oracle


def loss_and_gradient(est: Estimator, case: Problem, rows: list[Row]) -> tuple[float, torch.Tensor]:
    """As the project computes them, with respect to the student's logits."""
    logits_TV = case.student_TV.clone().requires_grad_()
    result = evaluate(est, cache_of(est, case, rows, student_logp(logits_TV, rows)))
    loss = result.loss_sum / max(result.count, 1)
    (gradient,) = torch.autograd.grad(loss, logits_TV, materialize_grads=True)
    return float(loss.detach()), gradient


def test_every_accepted_estimator_equals_the_oracle():
    case, seen = problem(1), Counter()
    for number, est in enumerate(accepted()):
        rows = draw_rows(est.support, case, np.random.default_rng(number))
        value, gradient = loss_and_gradient(est, case, rows)
        exact_value, exact_gradient = oracle(est, case, rows)
        assert math.isfinite(value)
        bounded("loss, float64: value against the oracle", abs(value - exact_value), 1e-12, est)
        error = (gradient - exact_gradient).abs().max()
        bounded("loss, float64: gradient against the oracle", error, 1e-12, est)
        seen[est.objective.type, est.support.type] += 1
    assert len(seen) > 40, "the sweep must not have become empty"


def test_advantages_of_turns_equal_the_oracle():
    """Of every objective from rewards; responses of several turns, some of them without reward."""
    case, kinds, mattered = problem(6, (4, 3, 5, 1)), Counter(), 0
    for number, est in enumerate(by_turn()):
        rows = draw_rows(est.support, case, np.random.default_rng(number))
        value, gradient = loss_and_gradient(est, case, rows)
        exact_value, exact_gradient = oracle(est, case, rows)
        bounded("loss by turns, float64: value", abs(value - exact_value), 1e-12, est)
        error = (gradient - exact_gradient).abs().max()
        bounded("loss by turns, float64: gradient", error, 1e-12, est)
        kinds[est.objective.type] += 1
        whole = est.model_copy(update={"credit": "trajectory"})
        mattered += abs(value - loss_and_gradient(whole, case, rows)[0]) > 1e-6
    assert kinds.keys() == {"reinforce", "ppo", "grpo", "gspo", "gepo", "mixture"}
    assert mattered > 0.8 * kinds.total()


@pytest.mark.parametrize("kind", ["gspo", "gepo"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_turns_that_share_an_advantage_have_the_gradient_of_their_response(kind, reduction):
    """GSPO-token is GSPO where every token of a response has one advantage."""
    case = problem(8, (3, 2))
    one_each = tuple(((n, r),) for n, r in zip(case.lengths, case.rewards, strict=True))
    case = replace(case, turns=one_each)
    objective = {"type": kind, "trust": {"type": "none"}}
    tree = {"objective": objective, "reduction": {"type": reduction}}
    whole = estimator(support={"type": "path"}, **tree)
    rows = draw_rows(whole.support, case, np.random.default_rng(0))
    value, gradient = loss_and_gradient(whole, case, rows)
    own_value, own = loss_and_gradient(whole.model_copy(update={"credit": "turn"}), case, rows)
    assert abs(value - own_value) < 1e-14
    assert float(gradient.abs().max()) > 1e-3
    bounded("GSPO-token against GSPO, float64: gradient", (gradient - own).abs().max(), 1e-14)


WEIGHTS = {
    "some of each": ((0.0, 2.0, 0.5, 1.0), (1.5, 0.0, 1.0, 0.3)),
    "one masked": ((1.0, 1.0, 1.0, 0.0), (0.7, 1.0, 1.0, 0.0)),
    "all masked": ((0.0,) * 4, (0.0,) * 4),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_responses_equal_the_oracle(name: str):
    """Teacher scores that no term reads are NaN; a term's statistics are of what it reads."""
    rewards, teachers = WEIGHTS[name]
    case = replace(problem(4), reward_weights=rewards, teacher_weights=teachers)
    plain = problem(4)
    mattered = 0
    for number, est in enumerate(accepted()):
        rows = draw_rows(est.support, case, np.random.default_rng(number))
        value, gradient = loss_and_gradient(est, case, rows)
        exact_value, exact_gradient = oracle(est, case, rows)
        bounded("weighed loss, float64: value", abs(value - exact_value), 1e-12, est)
        error = (gradient - exact_gradient).abs().max()
        bounded("weighed loss, float64: gradient", error, 1e-12, est)
        if number % 10 == 0:
            mattered += abs(value - loss_and_gradient(est, plain, rows)[0]) > 1e-6
    assert mattered > 0.8 * len(accepted()) / 10, "the weights must act"


@settings(deadline=None, max_examples=150)
@given(
    st.deferred(lambda: st.sampled_from(accepted())),
    st.integers(0, 10_000),
    st.lists(st.integers(0, 4), min_size=2, max_size=4).filter(
        lambda x: len(x) % 2 == 0 and any(x)
    ),
    st.floats(0, 0.5),
    st.floats(0.05, 3.0),
)
def test_any_shape_and_any_excluded_score_equals_the_oracle(
    est: Estimator, seed: int, lengths: list[int], excluded: float, spread: float
):
    """Empty and one-token responses; a share of the teacher's scores is -inf, path tokens too."""
    rng = np.random.default_rng(seed)
    case = problem(seed, tuple(lengths), spread=spread)
    rows = draw_rows(est.support, case, rng)
    if est.support.owner == "student":  # a teacher selects no id that it gives no probability
        gone_TV = torch.tensor(rng.random(case.teacher_TV.shape) < excluded)
        case = replace(case, teacher_TV=case.teacher_TV.masked_fill(gone_TV, -math.inf))
    value, gradient = loss_and_gradient(est, case, rows)
    exact_value, exact_gradient = oracle(est, case, rows)
    scale = max(1.0, abs(exact_value), float(exact_gradient.abs().max()))
    assert math.isfinite(scale)
    bounded("loss, float64, any shape: value", abs(value - exact_value) / scale, 1e-9, est)
    error = (gradient - exact_gradient).abs().max() / scale
    bounded("loss, float64, any shape: gradient", error, 1e-9, est)


@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_notices_a_shifted_row(seed: int):
    est, case = estimator(support={"type": "exact"}), problem(seed, lengths=(3, 2))
    rows = draw_rows(est.support, case, np.random.default_rng(seed))
    value, gradient = oracle(est, case, rows)
    late = replace(case, student_TV=case.student_TV.roll(1, 0))
    shifted_value, shifted_gradient = loss_and_gradient(est, late, rows)
    assert abs(value - shifted_value) > 1e-2
    assert float((gradient - shifted_gradient.roll(-1, 0)).abs().max()) > 1e-2


def test_student_equal_to_teacher_is_exactly_nothing_unless_stated():
    """Exceptions: draws of the teacher (0 in expectation), sets whose outside is dropped (what is
    left is the gradient of the set's mass), and whatever reads rewards or the sampler's advantage.
    """
    case = problem(2)
    goal = replace(case, student_TV=case.teacher_TV)
    tested = 0
    for number, est in enumerate(accepted()):
        rollout = any(getattr(t.objective, "advantage", "") == "rollout" for t in est.terms)
        if est.reads_reward or rollout:
            continue
        rows = draw_rows(est.support, goal, np.random.default_rng(number))
        value, gradient = loss_and_gradient(est, goal, rows)
        bounded("student == teacher: value", abs(value), 1e-14, est)
        dropped = any(getattr(t.objective, "outside", "") == "drop" for t in est.terms)
        if est.support.type != "teacher_mc" and not dropped:
            bounded("student == teacher: gradient", gradient.abs().max(), 1e-14, est)
        tested += 1
    assert tested > 100
    rows = draw_rows(estimator(support={"type": "exact"}).support, goal, np.random.default_rng(0))
    shifted = replace(goal, student_TV=goal.student_TV.roll(1, 0))
    assert abs(loss_and_gradient(estimator(support={"type": "exact"}), shifted, rows)[0]) > 0.01


def test_float32_log_probs_get_float32_gradients():
    case = problem(3)
    for est in accepted()[::25]:
        rows = draw_rows(est.support, case, np.random.default_rng(0))
        student_N = student_logp(case.student_TV, rows).float().requires_grad_()
        loss = evaluate(est, cache_of(est, case, rows, student_N)).loss_sum
        assert loss.dtype == torch.float64
        (gradient_N,) = torch.autograd.grad(loss, student_N, materialize_grads=True)
        assert gradient_N.dtype == torch.float32
        assert gradient_N.isfinite().all()


def test_a_teacher_score_that_is_no_number_spoils_the_loss():
    """Hidden, it would look like a batch that teaches nothing."""
    logp_N = torch.tensor([-0.5, -1.0], dtype=torch.float64)
    cache = ungrouped_cache(
        student_logp_N=logp_N.clone().requires_grad_(),
        sampler_logp_N=logp_N,
        teacher_logp_N=torch.tensor([-0.5, torch.nan], dtype=torch.float64),
        weight_N=torch.ones(2, dtype=torch.float64),
        row_N=torch.arange(2),
        path_T=torch.arange(2),
        sample_T=torch.zeros(2, dtype=torch.int64),
        num_samples=1,
    )
    assert evaluate(Estimator(), cache).loss_sum.isnan()


ON_POLICY = (
    {"type": "reverse_kl"},
    {"type": "grpo", "trust": {"type": "clip"}},
    {"type": "forward_kl"},
)
WRITTEN = (0.0, 0.0, 1.0, 1.0, 0.0, 0.0)
"""By response: the teacher wrote the second group."""


def imitating(objective: dict[str, Any], reduction: str, coefficient: float) -> Estimator:
    terms = [
        {"objective": objective, "coefficient": 0.7},
        {"objective": {"type": "sft_on_teacher"}, "coefficient": coefficient},
    ]
    support = {"type": "path" if objective["type"] == "grpo" else "mc"}
    tree = {"type": "mixture", "terms": terms}
    return estimator(support=support, objective=tree, reduction={"type": reduction})


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("objective", ON_POLICY, ids=lambda each: each["type"])
def test_a_mixture_with_the_teachers_answers_is_the_weighted_sum(
    objective: dict[str, Any], reduction: str
):
    """Value and gradient are 0.7 of the own term's on the student's text, 0.4 of cross-entropy."""
    own = tuple(1.0 - written for written in WRITTEN)
    weights = {"reward_weights": own, "teacher_weights": own, "imitation_weights": WRITTEN}
    case = replace(problem(6, (2, 3, 4, 1, 2, 2)), **weights)
    whole = imitating(objective, reduction, 0.4)
    rows = draw_rows(whole.support, case, np.random.default_rng(1))
    value, gradient = loss_and_gradient(whole, case, rows)
    exact_value, exact_gradient = oracle(whole, case, rows)
    bounded("loss with imitation, float64: value", abs(value - exact_value), 1e-12)
    bounded(
        "loss with imitation, float64: gradient", (gradient - exact_gradient).abs().max(), 1e-12
    )
    written_T = torch.tensor(WRITTEN)[case.sample_T] > 0
    path = torch.tensor(case.path)
    logp_T = torch.log_softmax(case.student_TV, -1).gather(1, path[:, None])[:, 0]
    if reduction == "token_mean":  # by hand: onehot - p, over all tokens that any term reads
        count = len(case.path)
        expected_TV = torch.softmax(case.student_TV, -1)
        expected_TV[torch.arange(count), path] -= 1
        expected_TV = 0.4 / count * expected_TV
        bounded("cross-entropy by hand", (gradient - expected_TV)[written_T].abs().max(), 1e-12)
        own_alone = imitating(objective, reduction, 1e-300)
        rest = loss_and_gradient(own_alone, case, rows)[0]
        by_hand = -0.4 * float(logp_T[written_T].sum()) / count
        bounded("value by hand", abs(value - rest - by_hand), 1e-12)
    assert float(gradient[written_T].abs().max()) > 1e-3
    assert float(gradient[~written_T].abs().max()) > 1e-3


def test_cross_entropy_alone_is_that_of_supervised_fine_tuning():
    case = replace(problem(7, (2, 3)), imitation_weights=(1.0, 1.0))
    est = estimator(objective={"type": "sft_on_teacher"})
    assert est.support.type == "path"
    assert not est.uses_ratio
    rows = draw_rows(est.support, case, np.random.default_rng(1))
    value, gradient = loss_and_gradient(est, case, rows)
    logits_TV = case.student_TV.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits_TV, torch.tensor(case.path))
    loss.backward()
    assert logits_TV.grad is not None
    bounded("sft against torch: value", abs(value - float(loss.detach())), 1e-12)
    bounded("sft against torch: gradient", (gradient - logits_TV.grad).abs().max(), 1e-12)


def test_scores_and_ratios_of_what_the_teacher_wrote_reach_nothing():
    """Not the sampler's log-probs of it, nor scores that were never asked for."""
    case = replace(
        problem(8, (2, 3, 2, 2)),
        teacher_weights=(1.0, 1.0, 0.0, 0.0),
        imitation_weights=(0.0, 0.0, 1.0, 1.0),
    )
    est = imitating({"type": "reverse_kl"}, "token_mean", 1.0)
    rows = draw_rows(est.support, case, np.random.default_rng(2))
    student_N = student_logp(case.student_TV, rows).requires_grad_()
    cache = cache_of(est, case, rows, student_N)
    written_N = cache.imitation_weight_B[cache.sample_T[cache.row_N]] > 0
    assert bool(cache.teacher_logp_N[written_N].isnan().all())
    other = replace(cache, sampler_logp_N=cache.sampler_logp_N.masked_fill(written_N, -50.0))
    found, changed = evaluate(est, cache), evaluate(est, other)
    assert torch.equal(found.loss_sum, changed.loss_sum)
    assert found.sums.keys() == changed.sums.keys()
    for name, total in found.sums.items():
        assert bool(total.isfinite()), name
        assert torch.equal(total, changed.sums[name]), name
