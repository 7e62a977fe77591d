"""Advantages and GEPO's group terms against slow oracles."""

import math
from dataclasses import replace
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.batching.advantages import (
    ADVANTAGES,
    STD_EPS,
    defensive_share,
    group_columns,
    log_group_expectation,
    rows_of,
)
from megatron_opd.config.estimator import Estimator
from megatron_opd.records.types import Sample, VersionSpan
from tests.support.fakes import make_prompt, make_rollout
from tests.support.figures import bounded
from tests.support.trajectories import trajectory

EXPECTATION = "log of GEPO's E_q[q], float64 against 60 digits"


def estimator(**objective: object) -> Estimator:
    return Estimator.model_validate({"support": {"type": "path"}, "objective": objective})


def sample(uid: int, logp: list[float], reward: float | None) -> Sample:
    """A response whose path tokens have these sampler log-probs; each row holds a second id."""
    tokens = len(logp)
    rollout = make_rollout(make_prompt(uid), (VersionSpan(0, 0, tokens),))
    sampler = np.stack([np.asarray(logp), np.full(tokens, np.nan)], 1).reshape(-1)
    draws = replace(rollout.draws, sampler_logp_N=sampler.astype(np.float32))
    return Sample(replace(rollout, draws=draws), np.zeros(2 * tokens, np.float32), reward)


groups = st.lists(
    st.lists(st.floats(-50, 50, allow_subnormal=False), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


def flattened(per_group: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    values = np.array([v for members in per_group for v in members])
    return values, np.array([g for g, members in enumerate(per_group) for _ in members])


@given(groups)
def test_advantages_follow_their_definitions(per_group: list[list[float]]):
    reward_B, group_B = flattened(per_group)
    expected: dict[str, list[float]] = {kind: [] for kind in ADVANTAGES}
    for members in per_group:
        mean = math.fsum(members) / len(members)
        squares = math.fsum((r - mean) ** 2 for r in members)
        sample = math.sqrt(squares / max(len(members) - 1, 1))
        population = math.sqrt(squares / len(members))
        for i, r in enumerate(members):
            others = members[:i] + members[i + 1 :]
            expected["reward"].append(r)
            expected["group_mean"].append(r - mean)
            expected["group_std"].append((r - mean) / (sample + STD_EPS))
            expected["group_std_population"].append((r - mean) / (population + STD_EPS))
            expected["leave_one_out"].append(r - math.fsum(others) / len(others) if others else 0)
    for kind, advantage in ADVANTAGES.items():
        # the standardised one divides rounding of the mean by at least STD_EPS
        limit = 1e-6 if kind.startswith("group_std") else 1e-12
        np.testing.assert_allclose(advantage(reward_B, group_B), expected[kind], atol=limit)


def test_group_std_divides_by_the_sample_deviation_of_torch_as_verl_and_trl_do():
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    group_B = np.zeros(8, int)
    wide = torch.tensor(rewards, dtype=torch.float64)
    expected = (wide - wide.mean()) / (wide.std() + STD_EPS)
    got = ADVANTAGES["group_std"](np.array(rewards), group_B)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12)
    population = ADVANTAGES["group_std_population"](np.array(rewards), group_B)
    np.testing.assert_allclose(population, got * math.sqrt(8 / 7), rtol=1e-5)


def test_equal_rewards_and_lonely_responses_teach_nothing():
    for kind in ("group_mean", "group_std", "group_std_population", "leave_one_out"):
        assert not ADVANTAGES[kind](np.ones(4), np.zeros(4, int)).any()
        assert not ADVANTAGES[kind](np.array([3.0, -1.0]), np.array([5, 9])).any()


def test_members_of_a_group_need_not_be_neighbours():
    got = ADVANTAGES["group_mean"](np.array([1.0, 10.0, 3.0, 30.0]), np.array([7, 2, 7, 2]))
    assert got.tolist() == [-1.0, -10.0, 1.0, 10.0]


def exact_log_expectation(logs: list[float]) -> float:
    """Eq. 11 as it is written, in decimals of 60 digits, which do not underflow."""
    with localcontext(prec=60):
        q = [Decimal(log).exp() for log in logs]
        return float((sum((x * x for x in q), Decimal()) / sum(q)).ln())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-750, 0), min_size=1, max_size=6), min_size=1, max_size=4))
def test_the_group_expectation_is_exact_where_probabilities_underflow(logs: list[list[float]]):
    logq_B, group_B = flattened(logs)
    expected = [exact_log_expectation(members) for members in logs for _ in members]
    got = log_group_expectation(logq_B, group_B)
    assert np.isfinite(got).all()
    error = np.abs(got - expected) / np.maximum(1, np.abs(expected))
    bounded(EXPECTATION, error.max(), 1e-13)
    for members, value in zip(logs, [got[group_B == g][0] for g in range(len(logs))], strict=True):
        assert min(members) - 1e-9 <= value <= max(members) + 1e-9


def test_a_group_of_one_is_its_own_expectation():
    logq_B = np.array([-700.25, -0.125])
    np.testing.assert_allclose(log_group_expectation(logq_B, np.array([0, 1])), logq_B, rtol=1e-15)


def test_the_defensive_share_is_the_variance_scaled_and_bounded():
    logq_B, group_B = np.log([0.2, 0.6, 0.5, 0.5]), np.array([0, 0, 1, 1])
    np.testing.assert_allclose(defensive_share(logq_B, group_B, 5.0), [0.2, 0.2, 0, 0])
    assert defensive_share(logq_B, group_B, 1e6).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert not defensive_share(np.array([-700.0, -800.0]), np.array([0, 0]), 1.0).any()


def test_a_response_of_thirty_thousand_tokens_stays_finite():
    long = sample(0, [-23.5] * 30_000, 1.0)
    short = sample(1, [-0.25], 0.0)
    assert long.rollout.geometric_logps == (-23.5,)
    columns = group_columns(estimator(type="gepo", defensive=1.0), [long, short], 2)
    np.testing.assert_allclose(columns.group_log_q_B, [-0.25, -0.25], atol=1e-9)
    assert columns.advantage_B.tolist() == [0.5, -0.5]
    q = np.exp([-23.5, -0.25])
    np.testing.assert_allclose(columns.defensive_B, q.var())


def test_a_reward_counts_once_for_a_sample_of_several_sequences():
    """The group's mean is over samples; probabilities are those of sequences."""
    layouts = ([[(2, 1)], [(1, 3)]], [[(2, 4)]])
    samples = [trajectory(uid, layout, reward=1.0 - uid) for uid, layout in enumerate(layouts)]
    samples[0] = replace(samples[0], masked=True)
    columns = group_columns(estimator(type="gepo", advantage="group_mean"), samples, 2)
    assert columns.advantage_B.tolist() == [0.5, 0.5, -0.5], "not -1/3 of three rows"
    assert columns.share_B.tolist() == [0.25, 0.75, 1.0]
    assert columns.teacher_weight_B.tolist() == [0.0, 0.0, 1.0]
    logq = [logp for sample in samples for logp in sample.rollout.geometric_logps]
    q = np.exp(logq)
    np.testing.assert_allclose(columns.group_log_q_B, np.log((q * q).sum() / q.sum()))


def test_groups_are_runs_of_uids():
    batch = [sample(uid, [-0.5], float(uid == 6)) for uid in (4, 5, 6, 7)]
    columns = group_columns(estimator(type="grpo", advantage="leave_one_out"), batch, 2)
    assert columns.advantage_B.tolist() == [0.0, 0.0, 1.0, -1.0]
    assert columns.group_log_q_B.tolist() == columns.defensive_B.tolist() == [0.0] * 4
    rows = rows_of(columns, [2, 0])
    assert rows.advantage_B.tolist() == [1.0, 0.0]
    assert rows.defensive_B.tolist() == [0.0, 0.0]


def mixture(*terms: dict[str, object]) -> Estimator:
    return estimator(type="mixture", terms=[{"objective": term} for term in terms])


def test_a_mixture_takes_its_columns_from_its_reward_term():
    batch = [sample(0, [-0.5], 1.0), sample(1, [-0.5], 0.0)]
    assert group_columns(mixture({"type": "reverse_kl"}, {"type": "gspo"}), batch, 2).advantage_B[
        0
    ] == pytest.approx(math.sqrt(0.5), abs=1e-5)
    with pytest.raises(ValueError, match="at most one objective from rewards"):
        mixture({"type": "gspo"}, {"type": "reinforce"})


def test_a_missing_reward_is_named():
    with pytest.raises(ValueError, match="sample 1 has no reward"):
        group_columns(estimator(type="grpo"), [sample(0, [-1.0], 1.0), sample(1, [-1.0], None)], 2)


def test_weights_follow_prompts_and_a_masked_response_has_none():
    """What is masked stays in its group's statistics, and its penalty in the advantage."""
    first, second = sample(0, [-1.0], 1.0), sample(1, [-1.0], 0.0)
    prompt = replace(first.rollout.prompt, reward_weight=0.5, teacher_weight=2.0)
    first = replace(first, rollout=replace(first.rollout, prompt=prompt), overlong_penalty=-0.25)
    second = replace(second, masked=True)
    columns = group_columns(estimator(type="grpo", advantage="group_mean"), [first, second], 2)
    assert columns.advantage_B.tolist() == [0.375, -0.375]
    assert columns.reward_weight_B.tolist() == [0.5, 0.0]
    assert columns.teacher_weight_B.tolist() == [2.0, 0.0]


def test_a_reward_that_is_not_read_may_be_missing():
    alone = sample(0, [-1.0], None)
    prompt = replace(alone.rollout.prompt, reward_weight=0.0)
    alone = replace(alone, rollout=replace(alone.rollout, prompt=prompt))
    columns = group_columns(
        mixture({"type": "reverse_kl"}, {"type": "grpo"}),
        [alone, sample(1, [-1.0], 1.0)],
        1,
    )
    assert np.isfinite(columns.advantage_B).all()
    assert columns.reward_weight_B.tolist() == [0.0, 1.0]
