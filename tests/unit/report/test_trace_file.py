"""Time lines as they are read: whole ones, half written ones, and ones that begin anew."""

from pathlib import Path

from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.report.trace_file import MOST_DROPS, TraceFile
from tests.support.recorded_run import record

ENGINE = "student http://a"


def draw(path: Path) -> TraceWriter:
    trace = TraceWriter(path, 10.0)
    trace.row("pipeline")
    trace.span(ENGINE, "rollout v0", 10.0, 12.0)
    trace.span(ENGINE, "rollout v0", 11.0, 13.0)
    trace.counter("pipeline", "samples", 11.0, {"rolling": 1})
    trace.span(ENGINE, "paused", 12.5, 12.75, lane=0)
    trace.span("learner", "update 0", 13.0, 14.5, {"samples": 4})
    trace.instant("pipeline", "drop: timeout", 12.0, {"uid": 3})
    return trace


def test_spans_that_overlap_are_one_busy_stretch(tmp_path: Path):
    draw(tmp_path / "t").close()
    found = TraceFile(tmp_path / "t")
    found.read()
    assert found.busy[ENGINE].intervals == ((0.0, 3.0),)
    assert found.paused[ENGINE].intervals == ((2.5, 2.75),)
    assert found.updates == {0: 4.5}
    assert (found.drops, found.drops_s) == ({"timeout": 1}, [2.0])
    assert (found.end_s, found.damaged) == (4.5, 0)


def test_a_time_line_is_read_as_it_grows(tmp_path: Path):
    path = tmp_path / "t"
    trace, found = draw(path), TraceFile(path)
    found.read()
    trace.flush()
    found.read()
    assert found.busy[ENGINE].seconds == 3.0
    assert not found.drops  # the last event waits for the line after it
    trace.span(ENGINE, "rollout v1", 15.0, 16.0)
    trace.close()
    found.read()
    assert found.busy[ENGINE].intervals == ((0.0, 3.0), (5.0, 6.0))
    assert found.damaged == 0


def test_a_time_line_that_begins_anew_replaces_the_old_one(tmp_path: Path):
    path = tmp_path / "t"
    draw(path).close()
    found = TraceFile(path)
    found.read()
    other = TraceWriter(path, 0.0)
    other.span("learner", "update 7", 0.0, 1.0)
    other.close()
    found.read()
    assert list(found.busy) == ["learner"]
    assert found.updates == {7: 1.0}


def test_lines_that_are_no_events_are_counted(tmp_path: Path):
    path = tmp_path / "t"
    draw(path).close()
    bad = [b'{"ph":"X","pid":99,"ts":1,"dur":1}', b'{"ph":"X"', b"\xff", b'{"ph":"X","pid":"a"}']
    bad += [b'{"ph":"X","pid":2,"tid":1,"name":"r","ts":5,"dur":-9}', b"[" * 50_000, b"7"]
    path.write_bytes(path.read_bytes().replace(b"\n]\n", b",\n" + b",\n".join(bad) + b"\n]\n"))
    found = TraceFile(path)
    found.read()
    assert found.damaged == len(bad)
    assert found.busy[ENGINE].seconds == 3.0


def test_all_drops_are_counted_and_the_first_ones_placed(tmp_path: Path):
    trace = draw(tmp_path / "t")
    for uid in range(MOST_DROPS + 5):
        trace.instant("pipeline", "drop: timeout", 12.0, {"uid": uid})
    trace.close()
    found = TraceFile(tmp_path / "t")
    found.read()
    assert found.drops["timeout"] == MOST_DROPS + 6
    assert len(found.drops_s) == MOST_DROPS


def test_what_a_recorded_run_draws_is_what_it_counted(tmp_path: Path):
    recorder, _ = record(tmp_path, drop={4})
    found = TraceFile(tmp_path / "trace.json")
    found.read()
    times = recorder.totals.times
    assert abs(found.busy["learner"].seconds - times.train.seconds) < 1e-4
    assert abs(found.busy["teacher scoring"].seconds - times.teacher.seconds) < 1e-4
    assert abs(found.busy["student student-0"].seconds - times.rollout["student-0"].seconds) < 1e-4
    assert found.drops.total() == 1
    assert sorted(found.updates) == list(range(7))
