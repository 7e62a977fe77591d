"""The time line is valid, complete, and no two spans of a lane overlap."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.metrics.trace import TraceWriter
from tests.support.recorded_run import record


def read(path):
    events = json.loads(path.read_text())
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return events, names


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=30))
def test_lanes_never_overlap_and_are_few(tmp_path_factory, spans):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace = TraceWriter(path, 0.0)
    spans = sorted(((start, start + length) for start, length in spans), key=lambda s: s[1])
    for start, stop in spans:
        trace.span("student-0", "rollout", float(start), float(stop))
    trace.close()
    events = [e for e in json.loads(path.read_text()) if e["ph"] == "X"]
    assert len(events) == len(spans)
    lanes = {}
    for event in events:
        lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(lane)))
    assert set(lanes) == set(range(1, len(lanes) + 1))
    # a run never needs more lanes than it had spans open together with another
    assert len(lanes) <= len(spans)


def test_an_empty_trace_is_valid(tmp_path):
    trace = TraceWriter(tmp_path / "t.json", 0.0)
    trace.close()
    trace.close()
    assert json.loads((tmp_path / "t.json").read_text()) == []


def test_a_run_has_a_row_per_stage_and_engine(tmp_path):
    record(tmp_path, drop={4})
    events, names = read(tmp_path / "trace.json")
    expected = ["pipeline", "student student-0", "teacher scoring", "learner", "weight sync"]
    assert [names[pid] for pid in sorted(names)] == expected
    rows = {}
    for event in events:
        if event["ph"] in "Xi":
            rows.setdefault(names[event["pid"]], []).append(event["name"])
    assert rows["learner"] == [f"update {k}" for k in range(7)]
    assert [name for name in rows["weight sync"] if " v" in name] == [
        f"weight sync v{k}" for k in range(1, 8)
    ]
    assert rows["weight sync"].count("send") == 7
    assert rows["student student-0"].count("paused") == 7
    assert rows["pipeline"].count("drop: nan") == 1
    assert rows["teacher scoring"].count("score") == 21
    assert sum(name.startswith("rollout v") for name in rows["student student-0"]) == 22
    assert any("-v" in name for name in rows["student student-0"]), "a rollout across a weight sync"
    assert any(event["ph"] == "C" for event in events)


def test_a_killed_run_leaves_a_file_that_misses_only_its_bracket(tmp_path):
    trace = TraceWriter(tmp_path / "t.json", 1.0)
    trace.span("learner", "update 0", 1.5, 2.0)
    trace.flush()
    text = (tmp_path / "t.json").read_text()
    (span,) = [e for e in json.loads(text + "]") if e["ph"] == "X"]
    assert (span["ts"], span["dur"]) == (500_000, 500_000)
    trace.close()
