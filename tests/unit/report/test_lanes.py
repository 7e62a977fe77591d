"""Time lines of all attempts on one clock, and what is left of long ones."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.metrics.intervals import BusyTime
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.report.lanes import MOST_LANES, shares, timeline_of
from megatron_opd.report.series import table_of
from megatron_opd.report.trace_file import TraceFile


def traced(path: Path, spans, drops_s=()) -> TraceFile:
    trace = TraceWriter(path, 0.0)
    trace.row("pipeline")
    for row, name, start_s, stop_s in spans:
        trace.span(row, name, start_s, stop_s, lane=0 if name == "paused" else None)
    for now_s in drops_s:
        trace.instant("pipeline", "drop: nan", now_s)
    trace.close()
    found = TraceFile(path)
    found.read()
    return found


def table(*times_s: float):
    return table_of([{"update": i, "time_s": time_s} for i, time_s in enumerate(times_s)])


def busy(timeline) -> dict[str, tuple]:
    return {
        lane.name: tuple(
            (pytest.approx(start_s), pytest.approx(stop_s))
            for start_s, stop_s in lane.members[0][0].intervals
        )
        for lane in timeline.lanes
    }


def test_a_trace_is_put_on_the_clock_of_the_rows(tmp_path: Path):
    one = traced(
        tmp_path / "1", [("learner", "update 0", 1, 3), ("learner", "update 1", 4, 6)], [2]
    )
    found = timeline_of([one], table(2.5, 5.5))
    assert busy(found) == {"learner": ((0.5, 2.5), (3.5, 5.5))}
    assert found.drops_s == (pytest.approx(1.5),)
    assert found.stop_s == pytest.approx(5.5)


def test_attempts_follow_each_other_and_what_was_thrown_away_is_cut(tmp_path: Path):
    first = traced(
        tmp_path / "1",
        [
            ("learner", "update 0", 0, 2),
            ("learner", "update 1", 2, 4),
            ("student a", "rollout v1", 1, 9),
        ],
        [1, 8],
    )
    # continued after update 0, which was done at 2 s
    second = traced(
        tmp_path / "2", [("learner", "update 1", 1, 3), ("student b", "rollout v1", 0, 3)]
    )
    found = timeline_of([first, second], table(2.0, 5.0))
    assert busy(found) == {
        "a": ((1, 2),),
        "b": ((2, 5),),
        "learner": ((0, 2), (3, 5)),
    }
    assert found.drops_s == (1.0,)
    assert found.drops == {"nan": 2}
    assert found.stop_s == 5.0


def test_an_attempt_that_made_no_update_cannot_be_placed(tmp_path: Path):
    lost = traced(tmp_path / "1", [("student a", "rollout v0", 0, 9)])
    one = traced(tmp_path / "2", [("learner", "update 0", 0, 2)])
    found = timeline_of([lost, one], table(2.0))
    assert (found.skipped, list(busy(found))) == (1, ["learner"])


def test_a_run_without_an_update_yet_is_drawn_from_its_own_begin(tmp_path: Path):
    one = traced(tmp_path / "1", [("student a", "rollout v0", 0, 9)])
    assert busy(timeline_of([one], table())) == {"a": ((0, 9),)}
    assert timeline_of([], table()) is None
    assert timeline_of([traced(tmp_path / "2", [])], table()) is None


def test_pauses_are_apart_and_do_not_count_as_work(tmp_path: Path):
    spans = [("student a", "rollout v0", 0, 8), ("student a", "paused", 2, 4)]
    one = traced(tmp_path / "1", [*spans, ("weight sync", "weight sync v1", 2, 10)])
    found = timeline_of([one], table())
    assert found.busy_share("student") == pytest.approx(0.6)
    assert found.busy_share("weight sync") == pytest.approx(0.8)
    assert found.busy_share("teacher") is None
    assert [lane.stage for lane in found.lanes] == ["student", "weight sync"]


def test_evaluations_have_a_lane_of_their_own(tmp_path: Path):
    spans = [("evaluation", "easy after 4 updates", 1, 3), ("learner", "update 0", 0, 1)]
    found = timeline_of([traced(tmp_path / "1", spans)], table())
    assert [lane.stage for lane in found.lanes] == ["evaluation", "learner"]
    assert busy(found)["evaluation"] == ((1, 3),)


def test_many_servers_share_lanes(tmp_path: Path):
    count = 2 * MOST_LANES + 1
    spans = [(f"student s{i}", "rollout v0", 0, 1 + i % 2) for i in range(count)]
    one = traced(tmp_path / "1", [*spans, ("learner", "update 0", 0, 2)])
    found = timeline_of([one], table(2.0))
    assert len(found.lanes) == 172  # of three servers each, and the learner
    assert sum(len(lane.members) for lane in found.lanes) == count + 1
    assert found.lanes[0].name == "s0 and 2 more"
    assert found.busy_share("student") == pytest.approx((count + count // 2) / count / 2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=5), max_size=3),
    st.integers(1, 7),
)
def test_shares_are_those_of_a_slow_count(members, bins):
    times = [BusyTime((start, start + length) for start, length in each) for each in members]
    found = shares(times, np.linspace(0, 50, bins + 1))
    ticks = np.arange(0, 50, 50 / bins / 100) + 25 / bins / 100
    covered = np.zeros(len(ticks))
    for each in times:
        for start, stop in each.intervals:
            covered += (ticks >= start) & (ticks < stop)
    slow = covered.reshape(bins, 100).mean(axis=1) / max(1, len(times))
    assert np.abs(found - slow).max() <= 0.01 * 5 + 1e-9
