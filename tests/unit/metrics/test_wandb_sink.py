"""Rows on their way to W&B: what the process gets, and a process that is slow, silent or dead."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_opd.config.metrics import WandbConfig
from megatron_opd.metrics.wandb_sink import WandbSink

READS_ALL = """
import sys
lines = sys.stdin.readlines()
open(sys.argv[1], "w").writelines(lines)
"""
REPORTS = """
import sys
sys.stdin.readline()
print("not reached", flush=True)
sys.stdin.read()
"""
NEVER_READS = "import time; time.sleep(600)"
DIES = "import sys; sys.stdin.readline(); sys.exit(3)"
NEVER_ENDS = "import sys, time; sys.stdin.read(); time.sleep(600)"


def make(tmp_path: Path, program: str, **changes) -> WandbSink:
    command = (sys.executable, "-c", program, str(tmp_path / "got"))
    given = {"finish_s": 30.0, "command": command} | changes
    settings = WandbConfig(project="p", tags=("a", "b"))
    log = tmp_path / "wandb.log"
    return WandbSink(settings, tmp_path, log, {"seed": 3}, "verl", **given)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_process_gets_the_run_and_then_rows(tmp_path: Path, caplog):
    sink = make(tmp_path, READS_ALL)
    sink.write(4, {"update": 4, "loss": 0.5, "reward_mean": None, "servers": {"u": 1}})
    sink.evaluated({"update": 5, "set": "gsm8k", "accuracy_pct": 60.0})
    sink.close()
    sink.close()
    about, row, evaluated = map(json.loads, (tmp_path / "got").read_text().splitlines())
    assert about == {
        **{"project": "p", "entity": None, "group": None, "mode": "online", "tags": ["a", "b"]},
        **{"name": tmp_path.name, "directory": str(tmp_path), "finish_s": 30.0, "init_s": 15.0},
        "config": {"seed": 3},
    }
    assert row == {"update": 4, "values": {"train/update": 4, "actor/loss": 0.5}}
    assert evaluated == {"update": 5, "values": {"eval/gsm8k/accuracy_pct": 60.0}}
    assert warnings(caplog) == []


def test_what_the_process_reports_is_a_warning(tmp_path: Path, caplog):
    sink = make(tmp_path, REPORTS)
    sink.write(0, {"loss": 1.0})
    sink.close()
    log = tmp_path / "wandb.log"
    assert warnings(caplog) == [
        f"wandb: not reached; the run goes on, its rows are in metrics.jsonl (log: {log})"
    ]


def test_a_process_that_dies_costs_one_line(tmp_path: Path, caplog):
    sink = make(tmp_path, DIES)
    process = sink._process
    assert process is not None
    process.wait(60)
    for update in range(5):
        sink.write(update, {"loss": 1.0})
    sink.close()
    (told,) = warnings(caplog)
    assert "its process has ended" in told


def test_one_that_dies_after_its_last_row_is_told_at_the_end(tmp_path: Path, caplog):
    sink = make(tmp_path, "import sys; sys.stdin.read(); sys.exit(3)")
    sink.write(0, {"loss": 1.0})
    sink.close()
    (told,) = warnings(caplog)
    assert "its process ended with status 3" in told


def test_a_process_that_reads_nothing_never_blocks_a_row(tmp_path: Path, caplog, monkeypatch):
    monkeypatch.setattr("megatron_opd.metrics.wandb_sink.BACKLOG_BYTES", 300_000)
    sink = make(tmp_path, NEVER_READS)
    process = sink._process
    assert process is not None
    row = {f"column_{i}": float(i) for i in range(400)}
    for update in range(200):  # 8 kB each; a pipe takes 64 kB
        sink.write(update, row)
    (told,) = warnings(caplog)
    assert "its process takes no rows" in told
    assert not is_alive(process.pid)
    sink.close()


def test_a_process_that_never_ends_is_ended(tmp_path: Path, caplog):
    sink = make(tmp_path, NEVER_ENDS, finish_s=0.2)
    process = sink._process
    assert process is not None
    sink.write(0, {"loss": 1.0})
    sink.close()
    (told,) = warnings(caplog)
    assert "did not finish within 0.2 s" in told
    assert process.returncode == -signal.SIGKILL


def test_one_that_cannot_be_started_costs_one_line(tmp_path: Path, caplog):
    sink = make(tmp_path, "", command=(str(tmp_path / "missing"),))
    sink.write(0, {"loss": 1.0})
    sink.close()
    (told,) = warnings(caplog)
    assert "its process cannot be started: No such file" in told


def test_a_ctrl_c_on_the_terminal_does_not_reach_it(tmp_path: Path):
    sink = make(tmp_path, READS_ALL)
    process = sink._process
    assert process is not None
    assert os.getpgid(process.pid) != os.getpgrp()
    sink.close()


def test_it_ends_when_the_run_is_killed(tmp_path: Path):
    """The pipe's end tells it, whatever happened to the run."""
    program = f"""
import os, sys
sys.path.insert(0, {str(Path.cwd())!r})
from pathlib import Path
from megatron_opd.config.metrics import WandbConfig
from megatron_opd.metrics.wandb_sink import WandbSink
here = Path({str(tmp_path)!r})
command = (sys.executable, "-c", {READS_ALL!r}, str(here / "got"))
sink = WandbSink(WandbConfig(project="p"), here, here / "log", {{}}, "opd", command)
sink.write(0, {{"loss": 1.0}})
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    deadline, lines = time.monotonic() + 120, []
    while time.monotonic() < deadline and len(lines) < 2:
        time.sleep(0.05)
        lines = (tmp_path / "got").read_text().splitlines() if (tmp_path / "got").exists() else []
    assert json.loads(lines[1]) == {"update": 0, "values": {"train/loss": 1.0}}
