"""Rewards, and how much those of a group differ."""

from dataclasses import replace

import pytest

from megatron_opd.metrics.recorder import batch_columns
from megatron_opd.metrics.rewards import RewardStats
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.types import Batch
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
