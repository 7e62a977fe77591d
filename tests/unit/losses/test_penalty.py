"""KL penalties off policy: by enumeration, with student, sampler and teacher all different."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_opd.config.load import ConfigError, load_config
from megatron_opd.config.schema import Config
from megatron_opd.losses.biases import bias_of
from megatron_opd.losses.objective import evaluate
from tests.support.figures import bounded
from tests.support.loss_cases import Problem, estimator, ungrouped_cache
from tests.support.loss_expectations import (
    PENALTIES,
    PENALTY_COEFFICIENT,
    UNBIASED,
    UNWEIGHTED,
    exact_penalty,
    expectation,
    outcomes,
    penalised,
    unrewarded,
)

COEFFICIENT = PENALTY_COEFFICIENT
REVERSE = [kl for kl in UNBIASED if kl.get("direction") == "reverse"]
FORWARD = [kl for kl in UNBIASED if kl not in REVERSE]
CORRECTIONS: list[dict[str, Any] | None] = [
    None,
    {"type": "none"},
    {"type": "truncated", "max_ratio": 1.05, "prox": True},
]
LARGEST = math.exp(math.log(torch.finfo(torch.float32).max) / 2)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("kl", UNBIASED, ids=str)
def test_every_penalty_but_the_unweighted_is_unbiased_in_value_and_gradient_off_policy(
    kl: dict[str, Any], correction: dict[str, Any] | None
):
    """Tokens of o, whatever the correction of the rewards' ratio is."""
    est = penalised(kl, correction=correction)
    for seed in range(3):
        value, gradient = expectation(est, unrewarded(seed))
        exact_value, exact_gradient = exact_penalty(kl, unrewarded(seed))
        bias = abs(value / COEFFICIENT - exact_value)
        slope = (gradient / COEFFICIENT - exact_gradient).abs().max()
        bounded("KL penalty off policy: value", bias, 1e-12, f"value of {kl}")
        bounded("KL penalty off policy: gradient", slope, 1e-12, f"gradient of {kl}")


def expected(case: Problem, value_of: Any) -> tuple[float, torch.Tensor]:
    """(mean, gradient of the mean) over tokens of o of a function of (log p, log reference)."""
    leaf = case.student_TV.clone().requires_grad_()
    log_p, o = torch.log_softmax(leaf[0], 0), case.sampler_TV[0].exp()
    value = (o * value_of(log_p)).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), gradient


def test_the_proof_sees_what_unweighed_penalties_do():
    """k1, k2, k3 of KL(p || f) on tokens of o: wrong in value, and k1 to the sampler runs away."""
    for seed in range(3):
        case = unrewarded(seed)
        for log_f in (case.teacher_TV[0], case.sampler_TV[0]):
            kl = REVERSE[0] if log_f is case.teacher_TV[0] else REVERSE[3]
            value, gradient = exact_penalty(kl, case)
            for unweighed in (
                lambda p, f=log_f: p - f,
                lambda p, f=log_f: (p - f).square() / 2,
                lambda p, f=log_f: (f - p).exp() - 1 + p - f,
            ):
                found_value, found = expected(case, unweighed)
                assert abs(found_value - value) > 1e-3
                assert float((found - gradient).abs().max()) > 1e-3
        away = expected(case, lambda p, f=case.sampler_TV[0]: p - f)[1]
        torch.testing.assert_close(away, -exact_penalty(FORWARD[0], case)[1])


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("kl", UNWEIGHTED, ids=str)
def test_the_unweighted_penalty_is_trls_expression_and_as_biased_as_it_says(
    kl: dict[str, Any], correction: dict[str, Any] | None
):
    """The expression of TRL, verl and GEPO's code, differentiated as it stands."""
    est = penalised(kl, correction=correction)
    for seed in range(3):
        case = unrewarded(seed)
        log_f = (case.teacher_TV if kl["to"] == "teacher" else case.sampler_TV)[0]
        published, slope = expected(case, lambda p, f=log_f: (f - p).exp() - (f - p) - 1)
        value, gradient = expectation(est, case)
        assert value / COEFFICIENT == pytest.approx(published, abs=1e-12)
        torch.testing.assert_close(gradient / COEFFICIENT, slope, rtol=0, atol=1e-12)
        exact_value, exact_slope = exact_penalty(kl, case)
        assert abs(published - exact_value) > 1e-3
        assert float((slope - exact_slope).abs().max()) > 1e-3


def test_what_the_unweighted_penalty_is_said_to_be_it_is():
    """To the sampler chi^2(o || p) - KL(o || p); to the teacher on policy grad KL(q || p)."""
    teacher, sampler = UNWEIGHTED
    for seed in range(3):
        case = unrewarded(seed)
        leaf, o = case.student_TV.clone().requires_grad_(), case.sampler_TV[0].exp()
        log_p = torch.log_softmax(leaf[0], 0)
        chi = (o**2 / log_p.exp()).sum() - 1 - (o * (o.log() - log_p)).sum()
        value, gradient = expectation(penalised(sampler), case)
        assert value / COEFFICIENT == pytest.approx(float(chi.detach()), abs=1e-12)
        (slope,) = torch.autograd.grad(chi, leaf)
        torch.testing.assert_close(gradient / COEFFICIENT, slope, rtol=0, atol=1e-12)

        fresh = replace(case, sampler_TV=torch.log_softmax(case.student_TV, -1))
        value, gradient = expectation(penalised(teacher), fresh)
        assert value / COEFFICIENT == pytest.approx(exact_penalty(teacher, fresh)[0], abs=1e-12)
        leaf, q = case.student_TV.clone().requires_grad_(), case.teacher_TV[0].exp()
        cross = -(q * torch.log_softmax(leaf[0], 0)).sum()
        (slope,) = torch.autograd.grad(cross, leaf)
        torch.testing.assert_close(gradient / COEFFICIENT, slope, rtol=0, atol=1e-12)


def test_k2_is_k3_and_only_k1_is_noisy_at_the_goal():
    case = unrewarded(1)
    for to in ("teacher", "sampler"):
        two, three = (
            expectation(penalised({"to": to, "direction": "reverse", "estimator": kind}), case)
            for kind in ("k2", "k3")
        )
        assert two[0] == three[0]
        assert torch.equal(two[1], three[1])
    goal = replace(case, student_TV=case.sampler_TV, teacher_TV=case.sampler_TV)
    for kl in PENALTIES:
        est = penalised(kl)
        slopes = [
            expectation(est, goal, [(1.0, row)])[1].abs().max()
            for _, row in outcomes(est.support, goal)
        ]
        assert (max(slopes) < 1e-15) == (kl["estimator"] != "k1")


def single(log_p: float, log_o: float, log_q: float, dtype: torch.dtype, kl: dict[str, Any]):
    """(loss, gradient with respect to log p) of one token."""
    student_N = torch.tensor([log_p], dtype=dtype, requires_grad=True)
    cache = ungrouped_cache(
        student_logp_N=student_N,
        sampler_logp_N=torch.tensor([log_o], dtype=dtype),
        teacher_logp_N=torch.tensor([log_q], dtype=dtype),
        weight_N=torch.ones(1, dtype=dtype),
        row_N=torch.arange(1),
        path_T=torch.arange(1),
        sample_T=torch.zeros(1, dtype=torch.int64),
        num_samples=1,
        advantage_B=torch.zeros(1, dtype=dtype),
    )
    objective = {"type": "reinforce", "kl": {"coefficient": 1.0} | kl}
    loss = evaluate(estimator(support={"type": "path"}, objective=objective), cache).loss_sum
    (gradient_N,) = torch.autograd.grad(loss, student_N)
    return float(loss.detach()), gradient_N


def test_a_token_that_the_sampler_likes_far_more_has_a_bounded_gradient():
    """log p = -6, log o = -1: -147 before, the gradient of exp(x) - 1 - x now."""
    value, gradient_N = single(-6.0, -1.0, -1.0, torch.float64, {"to": "sampler"})
    assert float(gradient_N[0]) == pytest.approx(math.expm1(-5), rel=1e-12)  # -0.9933
    assert value == pytest.approx(math.expm1(-5) + 5)
    _, weighed_N = single(-6.0, -1.0, -1.0, torch.float64, {"to": "teacher"})
    assert float(weighed_N[0]) == pytest.approx(-5 * math.exp(-5), rel=1e-12)  # -0.0337


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_p", [0.0, -1e-3, -3.0, -20.0, -44.0, -88.0, -100.0, -1000.0])
@pytest.mark.parametrize("log_o", [0.0, -3.0, -50.0])
@pytest.mark.parametrize("log_q", [0.0, -3.0, -50.0, -1000.0])
def test_penalties_far_from_the_reference_are_finite_and_exact_where_floats_reach(
    log_p: float, log_o: float, log_q: float, dtype: torch.dtype
):
    for kl in PENALTIES:
        value, gradient_N = single(log_p, log_o, log_q, dtype, kl)
        assert gradient_N.dtype == dtype
        assert math.isfinite(value)
        assert gradient_N.norm().isfinite(), "else clipping ends the run"
        assert abs(float(gradient_N[0])) <= LARGEST * (1 + 1e-6)
        log_f = log_q if kl["to"] == "teacher" else log_o
        x, log_rho = max(log_p, -300.0) - log_f, max(log_p, -300.0) - log_o
        if kl in UNBIASED and max(log_rho, log_f - log_o) > 44:
            continue  # cut: such a token is sampled once in 1e19
        rho = math.exp(min(log_rho, 700.0))
        slope = {"k1": rho * (x + 1), "k2": rho * x, "k3": rho * x}
        if kl in FORWARD:
            slope = {"k1": -1.0, "k3": math.expm1(x)}
        slope["k3_unweighted"] = -math.expm1(-x) if -x <= 44 else -LARGEST
        exact = slope[kl["estimator"]]
        assert float(gradient_N[0]) == pytest.approx(exact, rel=1e-3, abs=1e-30)
        assert value >= 0 or kl["estimator"] == "k1"


def test_a_token_that_the_reference_forbids_leaves_the_penalty():
    for kind in ("k1", "k2", "k3", "k3_unweighted"):
        value, gradient_N = single(
            -1.0, -2.0, -math.inf, torch.float64, {"to": "teacher", "estimator": kind}
        )
        assert value == 0
        assert gradient_N.tolist() == [0.0]


def test_a_score_that_is_no_number_spoils_the_penalty():
    assert math.isnan(single(-1.0, -2.0, math.nan, torch.float64, {"to": "teacher"})[0])


REFUSED = [
    ({"direction": "forward"}, ["direction forward", "to sampler", "got to teacher", "forward_kl"]),
    (
        {"to": "sampler", "estimator": "k2"},
        ["estimator k2", "direction reverse", "use estimator k3"],
    ),
    (
        {"to": "sampler", "direction": "forward", "estimator": "k3_unweighted"},
        ["estimator k3_unweighted", "direction reverse", "use estimator k3"],
    ),
]


@pytest.mark.parametrize(("kl", "words"), REFUSED, ids=str)
def test_penalties_without_a_sound_estimator_are_refused_in_one_line(
    tmp_path: Path, kl: dict[str, Any], words: list[str]
):
    path = tmp_path / "config.yaml"
    parts = ", ".join(f"{key}: {value}" for key, value in ({"coefficient": 1} | kl).items())
    path.write_text(
        "data: {train: train.jsonl, task: arithmetic}\nstudent: {model: student}\n"
        "teacher: {model: teacher}\nrollout: {group_size: 8}\n"
        f"objective: {{type: grpo, kl: {{{parts}}}}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(Config, path)
    message = str(caught.value)
    assert "\n" not in message
    for word in ["objective.kl", *words]:
        assert word in message


def test_what_is_estimated_is_said():
    for kl in PENALTIES:
        est = penalised(kl)
        objective: Any = est.objective
        said = objective.kl.estimates()
        assert ("penalty" in bias_of(objective, est)) == (kl in UNWEIGHTED)
        if kl in UNWEIGHTED:
            assert re.search(r"\bbiased", said)
            continue
        reference = "q" if kl["to"] == "teacher" else "o"
        assert said.startswith("KL(o || p)" if kl in FORWARD else f"KL(p || {reference})")
        assert "value and gradient unbiased" in said
