"""What weights add to the advantages, against loops in float64."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_opd.losses.objective import evaluate
from tests.support.loss_cases import (
    Problem,
    cache_of,
    draw_rows,
    estimator,
    problem,
    student_logp,
)

METHODS = ("grpo", "gspo", "gepo")
LENGTHS = (2, 1, 4, 3, 1, 2)


def estimator_of(method: str, **keys: Any) -> Any:
    return estimator(
        objective={"type": method, "advantage": "group_mean", **keys},
        correction={"type": "importance"},
        reduction={"type": "sequence_mean"},
    )


def sums_of(method: str, case: Problem, **keys: Any) -> dict[str, float]:
    est = estimator_of(method, **keys)
    rows = draw_rows(est.support, case, np.random.default_rng(0))
    sums = evaluate(est, cache_of(est, case, rows, student_logp(case.student_TV, rows))).sums
    return {name: float(sums[name]) for name in ("advantage_shift", "advantage_responses")}


def by_hand(method: str, case: Problem, kept: list[int]) -> float:
    """Sum over the kept responses of mean_t (w_t - 1) A."""
    logp_TV = torch.log_softmax(case.student_TV, -1)
    tokens = [[t for t, b in enumerate(case.sample_T) if b == i] for i in range(len(case.lengths))]
    log_p = [[float(logp_TV[t, case.path[t]]) for t in own] for own in tokens]
    log_o = [[float(case.sampler_TV[t, case.path[t]]) for t in own] for own in tokens]
    total = 0.0
    for i in kept:
        group = [j for j in range(len(tokens)) if j // 2 == i // 2]
        advantage = case.rewards[i] - sum(case.rewards[j] for j in group) / len(group)
        count = len(tokens[i])
        if method == "grpo":
            weights = [math.exp(p - o) for p, o in zip(log_p[i], log_o[i], strict=True)]
        elif method == "gspo":
            weights = [math.exp((sum(log_p[i]) - sum(log_o[i])) / count)]
        else:
            q = [math.exp(sum(log_o[j]) / len(log_o[j])) for j in group]
            expected_q = sum(value**2 for value in q) / sum(q)
            weights = [math.exp(sum(log_p[i]) / count) / expected_q]
        total += advantage * sum(w - 1 for w in weights) / len(weights)
    return total


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(5))
def test_what_weights_add_to_advantages_equals_the_loops(method: str, seed: int):
    case = problem(seed, LENGTHS)
    found = sums_of(method, case)
    exact = by_hand(method, case, list(range(len(LENGTHS))))
    assert abs(exact) > 1e-6
    assert found["advantage_shift"] == pytest.approx(exact, abs=1e-12)
    assert found["advantage_responses"] == len(LENGTHS)


@pytest.mark.parametrize("method", METHODS)
def test_responses_that_no_reward_reads_are_left_out(method: str):
    case = replace(problem(3, LENGTHS), reward_weights=(1.0, 1.0, 0.0, 1.0, 0.5, 1.0))
    found = sums_of(method, case)
    exact = by_hand(method, case, [0, 1, 3, 4, 5])
    assert found["advantage_shift"] == pytest.approx(exact, abs=1e-12)
    assert found["advantage_responses"] == 5


@pytest.mark.parametrize("method", METHODS)
def test_a_clip_does_not_hide_how_far_the_weights_are_off(method: str):
    case = problem(2, LENGTHS, spread=1.5)
    clipped = sums_of(method, case, trust={"type": "clip", "low": 0.01, "high": 0.01})
    assert clipped == pytest.approx(sums_of(method, case, trust={"type": "none"}))


@pytest.mark.parametrize(("method", "exact"), [("grpo", True), ("gspo", True), ("gepo", False)])
def test_on_policy_a_ratio_adds_nothing_and_gepo_adds_its_bias(method: str, exact: bool):
    case = problem(1, LENGTHS)
    found = sums_of(method, replace(case, student_TV=case.sampler_TV))
    assert (abs(found["advantage_shift"]) < 1e-12) == exact


def test_an_objective_without_rewards_has_none():
    est, case = estimator(objective={"type": "reverse_kl"}), problem(1)
    rows = draw_rows(est.support, case, np.random.default_rng(0))
    sums = evaluate(est, cache_of(est, case, rows, student_logp(case.student_TV, rows))).sums
    assert float(sums["advantage_responses"]) == 0
