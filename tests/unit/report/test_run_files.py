"""Run directories as readers find them: whole, half written, damaged, or none at all."""

import json
import os
from pathlib import Path

import pytest

from megatron_opd.checkpoint.run_dir import OURS, RunDir
from megatron_opd.checkpoint.run_lock import LOCK, RunLock
from megatron_opd.report import run_files
from megatron_opd.report.run_files import LOG_END_BYTES, NotARun, RunFiles


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.resolved.yaml").write_text("run: {dir: here, seed: 7}\n")
    (tmp_path / "metrics.jsonl").write_text('{"update": 0}\n{"upd')
    return tmp_path


def test_the_names_are_those_that_a_run_writes():
    written = RunDir(Path("r"))
    assert written.metrics.name == run_files.METRICS
    assert written.resolved_config.name == run_files.RESOLVED
    assert written.summary.name == run_files.SUMMARY
    assert written.trace.name == run_files.TRACE
    assert written.logs.name == run_files.LOGS
    assert written.changes.name == run_files.CHANGES
    assert run_files.EARLIER in OURS


def test_a_run_that_is_being_written_is_read(run: Path):
    files = RunFiles(run)
    assert files.metrics.read().rows == ({"update": 0},)
    assert (files.summary(), files.traces(), files.logs()) == (None, (), ())
    assert files.config() == {"run": {"dir": "here", "seed": 7}}
    assert files.written_s() == (run / "metrics.jsonl").stat().st_mtime


def test_reading_changes_nothing_and_takes_no_lock(run: Path):
    before = sorted((p.name, p.stat().st_mtime_ns) for p in run.iterdir())
    files = RunFiles(run)
    files.metrics.read_all()
    assert files.state().state == "crashed"
    assert sorted((p.name, p.stat().st_mtime_ns) for p in run.iterdir()) == before
    with RunLock.take(run):
        assert RunFiles(run).state().state == "running"
        assert (run / LOCK).exists()


def test_damaged_files_are_as_missing_ones(run: Path):
    (run / "summary.json").write_text('{"status"')
    (run / "config.resolved.yaml").write_text("run: {dir: [")
    (run / "changes.json").write_text('{"key": 1}')
    files = RunFiles(run)
    assert (files.summary(), files.config(), files.changes()) == (None, None, ())
    (run / "summary.json").write_text("[" * 100_000)
    (run / "config.resolved.yaml").write_bytes(b"\xff")
    (run / "changes.json").write_text('[1, {"key": "run.dir"}]')
    assert (files.summary(), files.config()) == (None, None)
    assert files.changes() == ({"key": "run.dir"},)


def test_time_lines_of_earlier_attempts_come_first(run: Path):
    for attempt in ("2", "10", "x"):
        (run / "earlier" / attempt).mkdir(parents=True)
        (run / "earlier" / attempt / "trace.json").write_text("[\n")
    (run / "earlier" / "3").mkdir()
    (run / "trace.json").write_text("[\n")
    names = [str(path.relative_to(run)) for path in RunFiles(run).traces()]
    assert names == ["earlier/2/trace.json", "earlier/10/trace.json", "trace.json"]


def test_the_end_of_a_log_is_read(run: Path):
    (run / "logs" / "folder").mkdir(parents=True)
    (run / "logs" / "b.log").write_bytes(b"bad \xff byte\n")
    (run / "logs" / "a.log").write_text("x" * LOG_END_BYTES + "\nlast line\n")
    a, b = RunFiles(run).logs()
    assert (a.name, a.num_bytes, a.end) == ("a.log", LOG_END_BYTES + 11, "last line\n")
    assert (b.name, b.end) == ("b.log", "bad \ufffd byte\n")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "there is no such directory"),
        (lambda path: path.write_text("x"), "is a file"),
        (lambda path: path.mkdir(), "is not a run's directory"),
        (lambda path: (path / "logs").mkdir(parents=True), "is not a run's directory"),
    ],
    ids=["missing", "file", "empty", "stranger"],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, make, said: str):
    make(tmp_path / "run")
    with pytest.raises(NotARun, match=said) as refusal:
        RunFiles(tmp_path / "run")
    assert "\n" not in str(refusal.value)


def test_a_summary_alone_is_a_run(tmp_path: Path):
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed", "cause": "no GPU"}))
    files = RunFiles(tmp_path)
    assert files.state().why == "no GPU"
    assert files.metrics.read_all().rows == ()
    os.unlink(tmp_path / "summary.json")
    assert files.written_s() is None
