"""A trajectory keeps each sampled id once, in runs that fit its sequences, within its limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.environments.trajectory import TrajectoryBuilder, TrajectoryLimits
from megatron_opd.records.runs import SampledRun, positions_of, runs_fault

WIDE = TrajectoryLimits(max_turns=9, max_tokens=10**6, max_turn_tokens=10**6, max_sequences=9)
IDS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
STEP = st.tuples(IDS, st.sampled_from(["give", "go on", "rewrite", "nothing"]), IDS)


@given(prompt=IDS, steps=st.lists(STEP, min_size=1, max_size=8))
def test_every_sampled_id_is_in_one_run_of_runs_that_fit(prompt, steps):
    builder = TrajectoryBuilder(prompt, WIDE)
    expected = []
    for ids, way, more in steps:
        builder.sample(ids)
        expected.append(ids)
        if way == "give":
            builder.give(more)
        elif way == "go on":
            assert not builder.replay([*builder.ids, *more])
        elif way == "rewrite":
            assert builder.replay([99, *more])
    built = builder.built()
    assert runs_fault([len(each) for each in built.sequences], built.runs) is None
    assert all(each.dtype == np.int32 for each in built.sequences)
    sampled = [built.sequences[r.sequence][r.start : r.stop].tolist() for r in built.runs]
    assert sampled == expected
    assert [run.turn for run in built.runs] == list(range(len(steps)))
    assert built.num_sampled == len(positions_of(built.runs)) == sum(map(len, expected))
    assert built.num_given == sum(map(len, built.sequences)) - built.num_sampled


def test_one_turn_is_one_sequence_with_one_run_at_its_end():
    builder = TrajectoryBuilder([1, 2], WIDE)
    builder.sample([3, 4, 5])
    built = builder.built()
    assert [each.tolist() for each in built.sequences] == [[1, 2, 3, 4, 5]]
    assert built.runs == (SampledRun(0, 2, 5, 0),)


def test_what_is_given_after_the_last_turn_is_left_out():
    builder = TrajectoryBuilder([1], WIDE)
    builder.sample([2])
    builder.give([3])
    builder.sample([4])
    builder.give([5, 6])
    (ids,) = builder.built().sequences
    assert ids.tolist() == [1, 2, 3, 4]


def test_a_rewritten_history_is_another_sequence_where_it_is_given():
    builder = TrajectoryBuilder([1], WIDE)
    builder.sample([2])
    assert builder.replay([1, 7])
    builder.sample([8])
    assert not builder.replay([1, 7, 8, 9])
    builder.sample([10])
    built = builder.built()
    assert [each.tolist() for each in built.sequences] == [[1, 2], [1, 7, 8, 9, 10]]
    assert built.runs == (SampledRun(0, 1, 2, 0), SampledRun(1, 2, 3, 1), SampledRun(1, 4, 5, 2))


def test_a_sequence_without_a_turn_is_left_out():
    builder = TrajectoryBuilder([1], WIDE)
    builder.sample([2])
    builder.replay([7])
    builder.replay([8])
    builder.sample([9])
    built = builder.built()
    assert [each.tolist() for each in built.sequences] == [[1, 2], [8, 9]]
    assert [run.sequence for run in built.runs] == [0, 1]


@pytest.mark.parametrize(
    ("limits", "ended"),
    [
        (TrajectoryLimits(1, 100, 100, 9), "max_turns"),
        (TrajectoryLimits(9, 3, 100, 9), "max_tokens"),  # of the second sequence
        (TrajectoryLimits(9, 100, 100, 9, 1), "max_sampled_tokens"),
        (TrajectoryLimits(9, 100, 100, 1), "max_sequences"),
        (TrajectoryLimits(2, 4, 100, 2, 2), None),  # 3 + 2 tokens in all
    ],
)
def test_the_limit_that_is_met_is_named(limits: TrajectoryLimits, ended: str | None):
    builder = TrajectoryBuilder([1, 2], limits)
    assert builder.limit is None
    builder.sample([3])
    builder.replay([7, 8, 9])
    assert builder.limit == ended


def test_the_room_of_a_turn_is_what_is_left_of_its_sequence():
    builder = TrajectoryBuilder([1, 2], TrajectoryLimits(9, 10, 5, 2))
    assert builder.room == (5, "max_turn_tokens")
    builder.sample([3, 4, 5, 6, 7])
    assert builder.room == (3, "max_tokens")
    builder.give([8, 9, 10, 11])
    assert builder.room == (0, "max_tokens")
    builder.replay([1, 2, 9])
    assert builder.room == (5, "max_turn_tokens")


def test_all_sequences_share_the_sampled_tokens():
    builder = TrajectoryBuilder([1, 2], TrajectoryLimits(9, 10, 5, 2, 7))
    builder.sample([3, 4, 5, 6])
    builder.give([7] * 3)  # given tokens count in their sequence alone
    assert builder.room == (1, "max_tokens")
    builder.replay([1, 2, 9])
    assert builder.room == (3, "max_sampled_tokens")
    builder.sample([3, 4, 5])
    assert builder.limit == "max_sampled_tokens"


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        (TrajectoryLimits(3, 100, 5), 15),
        (TrajectoryLimits(30, 100, 5), 100),
        (TrajectoryLimits(300, 100, 5, 4), 400),
        (TrajectoryLimits(300, 100, 5, 4, 250), 250),
        (TrajectoryLimits(3, 100, 5, 4, 250), 15),
    ],
)
def test_the_most_that_is_sampled_is_what_all_limits_allow(limits: TrajectoryLimits, most: int):
    assert limits.most_sampled == most


def test_a_prompt_as_long_as_the_limit_leaves_no_room():
    assert TrajectoryBuilder([1, 2, 3], TrajectoryLimits(9, 3, 5)).limit == "max_tokens"
