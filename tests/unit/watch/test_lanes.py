"""Lanes of a time line: mean occupancy of each bin against the spans themselves."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.watch.lanes import BusyLanes, Spans

times = st.floats(0, 100, allow_subnormal=False)


@given(st.lists(st.tuples(times, times), max_size=8), st.integers(1, 7))
def test_a_bin_holds_the_mean_number_of_open_spans(pairs: list[tuple[float, float]], bins: int):
    spans = Spans()
    for a, b in pairs:
        spans.add(min(a, b), max(a, b))
    edges = np.linspace(10.0, 90.0, bins + 1)
    found = spans.open_in(edges)
    for low, high, value in zip(edges[:-1], edges[1:], found, strict=True):
        covered = sum(max(0.0, min(high, max(p)) - max(low, min(p))) for p in pairs)
        assert value == pytest.approx(covered / (high - low), abs=1e-9)


def trace_of(path: Path) -> TraceWriter:
    trace = TraceWriter(path / "trace.json", 0.0)
    for row in ("pipeline", "student a", "weight sync"):
        trace.row(row)
    return trace


def test_a_trace_that_is_written_is_followed(tmp_path: Path):
    lanes, trace = BusyLanes(tmp_path / "trace.json"), trace_of(tmp_path)
    trace.span("student a", "rollout v0", 0.0, 2.0, {"uid": 1})
    trace.span("student a", "rollout v0", 1.0, 2.0, {"uid": 2})
    trace.span("weight sync", "weight sync v1", 2.0, 4.0, lane=1)
    trace.span("weight sync", "send", 2.0, 3.0, lane=1)
    trace.span("student a", "paused", 2.0, 3.0, lane=0)
    trace.instant("pipeline", "drop: nan", 3.0)
    trace.flush()
    lanes.read()
    # the last event is whole once the next one has begun a line after it
    trace.counter("pipeline", "samples", 4.0, {"rolling": 1})
    trace.close()
    lanes.read()
    found = lanes.between(None, None, 4)
    assert (found["from_s"], found["to_s"]) == (0.0, 4.0)
    by_name = {lane["name"]: lane for lane in found["lanes"]}
    assert list(by_name) == ["student a", "weight sync"]
    assert by_name["student a"]["open"] == [1.0, 2.0, 0.0, 0.0]
    assert by_name["student a"]["paused"] == [0.0, 0.0, 1.0, 0.0]
    assert by_name["weight sync"]["open"] == [0.0, 0.0, 1.0, 1.0]
    assert by_name["weight sync"]["paused"] is None


def test_a_window_beyond_the_end_is_cut(tmp_path: Path):
    trace = trace_of(tmp_path)
    trace.span("student a", "rollout v0", 0.0, 2.0)
    trace.close()
    lanes = BusyLanes(tmp_path / "trace.json")
    lanes.read()
    found = lanes.between(1.0, 50.0, 2)
    assert (found["from_s"], found["to_s"]) == (1.0, 2.0)
    assert lanes.between(5.0, None, 2)["lanes"][0]["open"] == [0.0, 0.0]


def test_there_may_be_no_trace_or_one_of_a_killed_run(tmp_path: Path):
    lanes = BusyLanes(tmp_path / "trace.json")
    assert not lanes.read()
    assert lanes.between(None, None, 3)["lanes"] == []
    (tmp_path / "trace.json").write_text('[\n{"ph":"M","pid":1,"name":"process_n\nnothing\n')
    lanes.read()
    assert lanes.between(None, None, 3)["lanes"] == []
