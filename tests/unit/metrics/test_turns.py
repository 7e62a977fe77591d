"""Figures of trajectories, by hand."""

from dataclasses import replace

from megatron_opd.metrics.catalogue import metric_of
from megatron_opd.metrics.recorder import batch_columns
from megatron_opd.metrics.turns import turn_columns
from megatron_opd.records.types import Batch, TurnFigures
from tests.support.trajectories import trajectory


def test_the_columns_of_two_trajectories():
    first = trajectory(0, [[(2, 3), (4, 2)], [(5, 1)]]).rollout  # 17 tokens, 6 of them sampled
    second = trajectory(1, [[(3, 4)]]).rollout
    figures = (
        TurnFigures(1.0, 0.5, calls=2, call_errors=1),
        TurnFigures(2.0, 4.0, calls=1, cached=8),
        TurnFigures(1.5, 0.0, cached=3),
    )
    first, second = replace(first, turns=figures), replace(second, turns=(TurnFigures(1.0, 0.5),))
    assert turn_columns([first, second]) == {
        "turns_mean": 2.0,
        "sequences_mean": 1.5,
        "given_tokens_mean": (11 + 3) / 2,
        "turn_sampling_s_mean": 5.5 / 2,
        "environment_s_mean": 2.5,
        "tool_calls_mean": 1.5,
        "tool_call_error_fraction": 1 / 3,
        "turn_cached_fraction": 11 / 14,  # of 9 tokens before the second turn and 5 of the third
    }
    assert all(metric_of(column) for column in turn_columns([first]))
    alone = turn_columns([second])
    assert alone["tool_call_error_fraction"] is alone["turn_cached_fraction"] is None


def test_single_turns_have_none_of_them():
    samples = tuple(trajectory(uid, [[(2, 3)]]) for uid in range(2))
    assert turn_columns([sample.rollout for sample in samples]) == {}
    assert "turns_mean" not in batch_columns(Batch(0, 0, samples))
