"""Figures of trajectories, by hand."""

from dataclasses import replace

import pytest

from megatron_opd.metrics.catalogue import metric_of
from megatron_opd.metrics.recorder import batch_columns
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.turns import sampling_times, turn_columns
from megatron_opd.records.types import Batch, TurnFigures, VersionSpan
from tests.support.fakes import make_prompt, make_rollout
from tests.support.trajectories import trajectory


def test_the_columns_of_two_trajectories():
    first = trajectory(0, [[(2, 3), (4, 2)], [(5, 1)]]).rollout  # 17 tokens, 6 of them sampled
    second = trajectory(1, [[(3, 4)]]).rollout
    figures = (
        TurnFigures(1.0, 0.5, calls=2, call_errors=1),
        TurnFigures(2.0, 4.0, calls=1, cached=8, waiting_s=0.75),
        TurnFigures(1.5, 0.0, cached=3, branch="edited", ignored=2),
    )
    first, second = replace(first, turns=figures), replace(second, turns=(TurnFigures(1.0, 0.5),))
    assert turn_columns([first, second]) == {
        "turns_mean": 2.0,
        "sequences_mean": 1.5,
        "given_tokens_mean": (11 + 3) / 2,
        "turn_sampling_s_mean": 5.5 / 2,
        "turn_waiting_s_mean": 0.75 / 2,
        "environment_s_mean": 2.5,
        "tool_calls_mean": 1.5,
        "tool_call_error_fraction": 1 / 3,
        "turn_cached_fraction": 11 / 14,  # of 9 tokens before the second turn and 5 of the third
        "settings_ignored_mean": 1.0,
        "branches_new_mean": 0.0,
        "branches_edited_mean": 0.5,
        "branches_sibling_mean": 0.0,
        "branches_rewritten_mean": 0.0,
    }
    anew = replace(first, turns=(*figures[:2], TurnFigures(1.5, 0.0, cached=3, branch="new")))
    assert turn_columns([anew])["turn_cached_fraction"] == 8 / 9, "what begins anew has no cache"
    assert turn_columns([anew])["branches_new_mean"] == 1.0
    assert all(metric_of(column) for column in turn_columns([first]))
    alone = turn_columns([second])
    assert alone["tool_call_error_fraction"] is alone["turn_cached_fraction"] is None


def test_the_columns_of_rewarded_turns():
    rewards = [(1.0, None, 2.0), (1.0, 0.0), (0.0,), (0.0, None)]
    samples = tuple(
        replace(
            made := trajectory(uid, [[(2, 1)] * len(own)]),
            reward=sum(reward or 0.0 for reward in own),
            rollout=replace(
                made.rollout, turns=tuple(TurnFigures(1.0, 0.0, reward=reward) for reward in own)
            ),
        )
        for uid, own in enumerate(rewards)
    )
    columns = batch_columns(Batch(0, 0, samples), 2, "turn")
    assert columns["turn_rewarded_fraction"] == 6 / 8
    assert columns["turn_alone_fraction"] == 2 / 6, "the third turn, and the second of sample 1"
    assert columns["reward_uniform_group_fraction"] == 1.0, "3 and 1 in all, alike turn by turn"
    whole = batch_columns(Batch(0, 0, samples), 2)
    assert whole["reward_uniform_group_fraction"] == 0.5
    assert "turn_rewarded_fraction" not in whole
    assert batch_columns(Batch(0, 0, samples), 1, "turn")["turn_alone_fraction"] is None


def test_servers_work_on_turns_and_not_while_they_are_answered():
    single = make_rollout(make_prompt(1), (VersionSpan(0, 0, 3),))
    rollout = replace(single, started_s=10.0, finished_s=20.0)
    assert sampling_times(rollout) == [(10.0, 20.0)]
    turns = (TurnFigures(2.0, 3.0, waiting_s=0.5), TurnFigures(1.0, 2.5))
    # a second and a half before the first turn were the environment's, to begin
    assert sampling_times(replace(rollout, turns=turns)) == [(12.0, 13.5), (16.5, 17.5)]
    parallel = (TurnFigures(8.0, 0.0), TurnFigures(9.0, 0.5))
    assert sampling_times(replace(rollout, turns=parallel)) == [(10.0, 10.5), (10.5, 19.5)]
    totals = RunTotals(["s"])
    totals.add_rollout(replace(rollout, turns=turns, engine="s"))
    assert totals.times.fleet_idle_ratio() == pytest.approx(1 - 2.5 / 5.5)


def test_single_turns_have_none_of_them():
    samples = tuple(trajectory(uid, [[(2, 3)]]) for uid in range(2))
    assert turn_columns([sample.rollout for sample in samples]) == {}
    assert "turns_mean" not in batch_columns(Batch(0, 0, samples))
