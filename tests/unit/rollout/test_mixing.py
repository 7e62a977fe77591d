"""Mixtures of teachers against float64: scores, draws by enumeration, losses and gradients."""

import asyncio
import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.config.estimator import Estimator
from megatron_opd.losses.objective import evaluate
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.types import VersionSpan
from megatron_opd.rollout.mixing import asks_of, mixture_logp
from megatron_opd.rollout.score_requests import TeacherAsk
from megatron_opd.rollout.scorer import FleetScorer
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.protocol import MAX_DRAWS
from tests.support.config_files import minimal
from tests.support.fakes import make_prompt, make_rollout
from tests.support.figures import bounded
from tests.support.loss_cases import (
    Problem,
    Row,
    accepted,
    cache_of,
    draw_rows,
    problem,
    student_logp,
)
from tests.support.loss_oracles import oracle
from tests.support.mixed_teachers import SHARES, ToyTeacher, mixed_prompt, path_rollout
from tests.support.trajectories import VOCAB, trajectory

CODE, MATH = (0.1, 0.6, 0.3), (0.5, 0.25, 0.25)
MIXED = 0.3 * np.array(CODE) + 0.7 * np.array(MATH)
TEACHERS = {"math": {"model": "m"}, "code": {"model": "c"}}


def scorer_of(code, math_, vocab_size=3, **tree) -> FleetScorer:
    config = minimal(
        teacher=None, teachers=TEACHERS, scoring={"mixture": dict(SHARES), "attempts": 2}, **tree
    )
    fleets = {"teachers.code": code, "teachers.math": math_}
    return FleetScorer(config, fleets, vocab_size, "run7")


def scored(scorer, rollout):
    return asyncio.run(scorer.score(rollout))


def test_every_teacher_scores_the_students_ids_and_q_is_their_sum():
    rng = np.random.default_rng(1)
    probs = rng.dirichlet(np.ones(12), 2)
    code, math_ = ToyTeacher(probs[0]), ToyTeacher(probs[1])
    rollout = make_rollout(mixed_prompt(make_prompt(5)), (VersionSpan(0, 0, 3),))
    sample = scored(scorer_of(code, math_, 12), rollout)
    ids_N = rollout.draws.ids_N
    expected_N = np.log(0.3 * probs[0][ids_N] + 0.7 * probs[1][ids_N])
    bounded("mixture, float32 scores", np.abs(sample.teacher_logp_N - expected_N).max(), 3e-7)
    geometric_N = 0.3 * np.log(probs[0][ids_N]) + 0.7 * np.log(probs[1][ids_N])
    assert np.abs(sample.teacher_logp_N - geometric_N).max() > 1e-2, "control: not mixed in logs"
    assert sample.rollout is rollout
    (first,), (second,) = code.asked, math_.asked
    assert (first.rid, second.rid) == ("run7-score-5-m0", "run7-score-5-m1")
    assert first.ids_N is second.ids_N is rollout.draws.ids_N
    path_T = rollout.draws.path_T
    own = {"code": probs[0], "math": probs[1]}
    for name, shape in sample.parts:
        logp_T = np.log(own[name][ids_N[path_T]]).astype(np.float32)
        assert shape == ScoreShape.of(logp_T, 12)
    assert [name for name, _ in sample.parts] == ["code", "math"]


def test_a_mixture_never_underflows():
    far = [(0.5, np.array([-2000.0, -3000.0, -1e9])), (0.5, np.array([-2000.0, -10.0, -np.inf]))]
    found = mixture_logp(far)
    assert np.allclose(found, [-2000, -10 + math.log(0.5), -1e9 + math.log(0.5)])
    tails = mixture_logp([(0.3, np.array([-np.inf])), (0.7, np.array([-np.inf]))])
    assert tails.tolist() == [-np.inf]


def test_one_teacher_of_weight_one_is_asked_as_ever():
    """The request and the scores are bitwise those of a prompt that names its teacher."""
    ask = TeacherAsk("r", 1.0, 0, 4, 7, 50)
    (only,) = asks_of((("math", 1.0),), ask)
    assert (only.step, only.rid, only.num_draws, only.seed) == (None, "r", 4, 7)
    with pytest.raises(ValueError, match="likeliest"):
        asks_of(SHARES, TeacherAsk("r", 1.0, 2, 0, 7, 50))


@pytest.mark.parametrize("draws", [1, 2, 7, MAX_DRAWS])
@pytest.mark.parametrize("weights", [(0.3, 0.7), (0.5, 0.5), (1e-6, 1 - 1e-6), (0.2, 0.3, 0.5)])
def test_draws_are_divided_so_that_no_variance_is_above_that_of_plain_draws(draws, weights):
    shares = tuple((f"t{number}", weight) for number, weight in enumerate(weights))
    asks = asks_of(shares, TeacherAsk("r", 1.0, 0, draws, 7, 50))
    assert [ask.teacher for ask in asks] == ["t0", "t1", "t2"][: len(weights)] + [
        "t0",
        "t1",
    ][: len(weights) - 1]
    selecting = asks[: len(weights)]
    for ask, weight in zip(selecting, weights, strict=True):
        assert 1 <= ask.num_draws <= MAX_DRAWS
        assert weight / ask.num_draws <= 1 / draws + 1e-15
    assert sum(ask.num_draws for ask in selecting) <= draws + len(weights) - 1
    assert len({ask.seed for ask in asks}) == len(asks), "strata are independent"
    assert [ask.step.last for ask in asks] == [False] * (len(asks) - 1) + [True]


def test_draws_of_a_mixture_are_unbiased_and_vary_less_by_enumeration():
    """Every outcome of 1 + 2 draws, with its probability: E[sum w f] = E_q f, Var <= Var_q / m."""
    m, mean_V, square = 2, np.zeros(3), np.zeros(3)
    support = {"type": "teacher_mc", "m": m}
    total = 0.0
    for first in range(3):
        for second in itertools.product(range(3), repeat=2):
            code = ToyTeacher(CODE, lambda count, first=first: [first][:count])
            math_ = ToyTeacher(MATH, lambda count, second=second: second[:count])
            scorer = scorer_of(code, math_, support=support, objective={"type": "forward_kl"})
            sample = scored(scorer, path_rollout(mixed_prompt(make_prompt(5)), [2]))
            draws = sample.rollout.draws
            weight_V = np.zeros(3)
            weight_V[draws.ids_N] = draws.weight_N
            assert weight_V.sum() == pytest.approx(1, abs=1e-6)
            error = np.abs(sample.teacher_logp_N - np.log(MIXED[draws.ids_N])).max()
            assert error < 3e-7, "every id has the mixture's log-prob, whoever drew it"
            assert draws.ids_N[draws.path_T].tolist() == [2]
            chance = CODE[first] * MATH[second[0]] * MATH[second[1]]
            mean_V += chance * weight_V
            square += chance * weight_V**2
            total += chance
    assert total == pytest.approx(1)
    bounded("draws of a mixture, float32: mean", np.abs(mean_V - MIXED).max(), 1e-7)
    variance_V, plain_V = square - mean_V**2, MIXED * (1 - MIXED) / m
    assert (variance_V <= plain_V + 1e-7).all()
    assert (variance_V < 0.9 * plain_V).any()


def test_draws_of_several_tokens_keep_their_rows():
    rng = np.random.default_rng(3)
    probs = rng.dirichlet(np.ones(9), 2)
    code = ToyTeacher(probs[0], lambda count: rng.choice(9, count, p=probs[0]))
    math_ = ToyTeacher(probs[1], lambda count: rng.choice(9, count, p=probs[1]))
    support = {"type": "teacher_mc", "m": 5}
    scorer = scorer_of(code, math_, 9, support=support, objective={"type": "forward_kl"})
    rollout = path_rollout(mixed_prompt(make_prompt(5)), [8, 0, 3, 3])
    draws = (sample := scored(scorer, rollout)).rollout.draws
    mixed_V = np.log(0.3 * probs[0] + 0.7 * probs[1])
    assert np.abs(sample.teacher_logp_N - mixed_V[draws.ids_N]).max() < 5e-7
    sums_T = np.add.reduceat(draws.weight_N, draws.offsets_T1[:-1])
    assert np.allclose(sums_T, 1)
    assert draws.ids_N[draws.path_T].tolist() == [8, 0, 3, 3]
    assert np.isfinite(draws.sampler_logp_N).sum() == 4
    assert [(len(code.asked), len(math_.asked))] == [(2, 1)], "the last to draw scores all at once"
    assert [each.num_draws for each in (*code.asked, *math_.asked)] == [2, 0, 4]


def test_sequences_of_a_trajectory_are_mixed_each():
    whole = trajectory(4, [[(2, 3), (1, 2)], [(3, 1)]])
    rollout = replace(whole.rollout, prompt=mixed_prompt(whole.rollout.prompt))
    probs = np.random.default_rng(1).dirichlet(np.ones(VOCAB), 2)
    sample = scored(scorer_of(ToyTeacher(probs[0]), ToyTeacher(probs[1]), VOCAB), rollout)
    expected_N = np.log(0.3 * probs[0] + 0.7 * probs[1])[rollout.draws.ids_N]
    assert np.abs(sample.teacher_logp_N - expected_N).max() < 1e-6
    path_N = rollout.draws.ids_N[rollout.draws.path_T]
    for (_, shape), probs_V in zip(sample.parts, probs, strict=True):
        assert shape.rows == len(path_N)
        assert shape.mean == pytest.approx(np.log(probs_V[path_N]).mean(), rel=1e-6)


def test_one_teacher_that_fails_drops_the_sample():
    class Gone:
        async def score(self, request):
            raise ServerUnreachable("http://t:1", "/generate", "reset", sent=True)

    rollout = make_rollout(mixed_prompt(make_prompt(5)), (VersionSpan(0, 0, 3),))
    with pytest.raises(ScoreRejected) as caught:
        scored(scorer_of(ToyTeacher(np.full(12, 1 / 12)), Gone(), 12), rollout)
    assert caught.value.reason == "teacher_unreachable"
    broken = ToyTeacher([*np.full(11, 1 / 11), 1])
    broken.logp_V[9] = np.nan
    with pytest.raises(ScoreRejected) as caught:
        scored(scorer_of(broken, ToyTeacher(np.full(12, 1 / 12)), 12), rollout)
    assert caught.value.reason == "teacher_nan"


def mixed_case(case: Problem, weights: tuple[float, float]) -> tuple[Problem, Problem, Problem]:
    """The case with q = sum w_i q_i of probabilities; as the project mixes; and mixed in logs."""
    generator = torch.Generator().manual_seed(9)
    noise = torch.randn(case.teacher_TV.shape, dtype=torch.float64, generator=generator)
    second_TV = torch.log_softmax(case.teacher_TV + 1.5 * noise, -1)
    (a, b), logps = weights, (case.teacher_TV, second_TV)
    q_TV = a * logps[0].exp() + b * logps[1].exp()
    weighted = list(zip(weights, (each.numpy() for each in logps), strict=True))
    ours_TV = torch.tensor(mixture_logp(weighted))
    geometric_TV = a * logps[0] + b * logps[1]
    return tuple(replace(case, teacher_TV=each) for each in (q_TV.log(), ours_TV, geometric_TV))


def loss_and_gradient(est: Estimator, case: Problem, rows: list[Row]) -> tuple[float, torch.Tensor]:
    logits_TV = case.student_TV.clone().requires_grad_()
    result = evaluate(est, cache_of(est, case, rows, student_logp(logits_TV, rows)))
    loss = result.loss_sum / max(result.count, 1)
    (gradient,) = torch.autograd.grad(loss, logits_TV, materialize_grads=True)
    return float(loss.detach()), gradient


def test_losses_that_read_a_mixture_equal_the_oracle():
    """Every estimator that reads teachers, on what a mixture may cache; logs mixed instead differ.

    `outside` of top-k losses sums what is cached of q, and the rest of a mixture is linear in it.
    """
    definition, ours, geometric = mixed_case(problem(1), (0.3, 0.7))
    families, apart, tried = set(), Counter(), Counter()
    for number, est in enumerate(accepted()):
        kinds = {(each.type, est.support.type) for each in est.objectives}
        if not est.reads_teacher or est.support.type == "teacher_topk":
            continue
        if kinds <= families and number % 5:
            continue
        families |= kinds
        rows = draw_rows(est.support, definition, np.random.default_rng(number))
        exact_value, exact_gradient = oracle(est, definition, rows)
        value, gradient = loss_and_gradient(est, ours, rows)
        bounded("mixture, float64: value", abs(value - exact_value), 1e-12, est)
        bounded("mixture, float64: gradient", (gradient - exact_gradient).abs().max(), 1e-12, est)
        wrong_value, wrong_gradient = loss_and_gradient(est, geometric, rows)
        error = abs(wrong_value - exact_value) + float(
            (wrong_gradient - exact_gradient).abs().max()
        )
        apart[est.objective.type] += error > 1e-6
        tried[est.objective.type] += 1
    assert len(families) > 40, "the sweep must not have become empty"
    assert all(apart[kind] > 0.5 * count for kind, count in tried.items()), (apart, tried)
