"""Rewards, and how much those of a group differ."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_opd.metrics.recorder import batch_columns
from megatron_opd.metrics.rewards import RewardStats
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.records.types import Batch
from tests.support.fakes import Figures, make_sample


def test_rewards_and_how_much_groups_differ():
    rewards = [1.0, 0.0, 1.0, 1.0, None, 0.0]
    batch = Batch(0, 0, tuple(replace(make_sample(i), reward=r) for i, r in enumerate(rewards)))
    single, paired = RewardStats(), RewardStats(2)
    assert single.mean is paired.group_std is paired.uniform_groups is None
    for stats in (single, paired):
        stats.add(batch)
        assert stats.mean == pytest.approx(3 / 5)
    assert single.group_std is single.uniform_groups is None
    # deviations 1/2, 0 and (of the one reward there is) 0
    assert paired.group_std == pytest.approx(1 / 6)
    assert paired.uniform_groups == pytest.approx(2 / 3)
    columns = batch_columns(batch, 2)
    assert columns["reward_mean"] == pytest.approx(0.6)
    assert columns["reward_uniform_group_fraction"] == pytest.approx(2 / 3)
    totals = RunTotals(group_size=2)
    totals.add_update(batch, Figures(), 0.0, 1.0)
    assert totals.rewards.group_std == paired.group_std


def test_prompts_that_learn_from_no_reward_are_in_no_group_figure():
    samples = [replace(make_sample(i), reward=float(i == 1)) for i in range(4)]
    teacher_only = replace(samples[2].rollout.prompt, reward_weight=0.0)
    samples[2:] = [
        replace(s, rollout=replace(s.rollout, prompt=replace(teacher_only, uid=i)))
        for i, s in enumerate(samples[2:], start=2)
    ]
    columns = batch_columns(Batch(0, 0, tuple(samples)), 2)
    assert columns["reward_mean"] == 0.25
    assert columns["reward_uniform_group_fraction"] == 0.0, "groups 1 learns from no reward"


def test_what_length_and_weights_did_is_counted():
    samples = [replace(make_sample(i), reward=1.0, overlong_penalty=-i / 4) for i in range(4)]
    unscored = np.full_like(samples[0].teacher_logp_N, np.nan)
    samples[3] = replace(samples[3], masked=True, teacher_logp_N=unscored)
    batch, totals = Batch(0, 0, tuple(samples)), RunTotals(group_size=2)
    totals.add_update(batch, Figures(), 0.0, 1.0)
    columns = batch_columns(batch, 2)
    assert columns["overlong_penalty_mean"] == totals.rewards.overlong_penalty == -0.375
    assert columns["masked_samples"] == totals.masked_samples == 1
    assert columns["samples_without_teacher"] == totals.samples_without_teacher == 1
    for reason in ("all_right", "all_right", "all_wrong", "all_wrong", "all_wrong", "all_wrong"):
        totals.add_drop(reason)
    assert totals.dropped_groups() == {
        "groups_all_right": 1,
        "groups_all_wrong": 2,
        "groups_no_reward_spread": 0,
    }
