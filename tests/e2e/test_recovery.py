"""Parts of a real `opd run` are killed, and it goes on, or ends as it should."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Sections
from tests.e2e.runs import Running, held_by, write_config

pytestmark = pytest.mark.e2e

STOP_LIMIT_S = 15


def kill_a_server(running: Running) -> str:
    """Kill all processes of a server of the run; returns its address."""
    with_us = [process for process in running.seen if process.is_running()]
    server = next(p for p in with_us if "sglang_bridge.server" in p.cmdline())
    arguments = server.cmdline()  # a zombie has none
    os.killpg(server.pid, signal.SIGKILL)
    port = arguments[arguments.index("--port") + 1]
    return f"http://127.0.0.1:{port}"


def test_interrupt_stops_everything_and_keeps_the_summary(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """The student's only server is the run's own, the teacher is not. It is killed before."""
    teacher = shared["teacher"]
    running = start(write_config(inputs, tmp_path, run={"max_steps": 5000}, teacher=teacher))
    running.wait_until(running.has_updated)
    running.look()
    url, updates = kill_a_server(running), running.updates()
    # more than what was sampled already can carry
    running.wait_until(lambda: running.updates() >= updates + 5)
    running.process.send_signal(signal.SIGINT)
    stopped = time.monotonic()
    time.sleep(0.5)
    running.process.send_signal(signal.SIGINT)  # an impatient user changes nothing
    running.process.send_signal(signal.SIGTERM)
    done = running.finish(STOP_LIMIT_S)
    assert time.monotonic() - stopped < STOP_LIMIT_S
    assert done.code == 130, done.output
    assert asyncio.run(held_by(teacher["urls"][0]))[1], "the teacher serves on"
    assert done.summary["status"] == "interrupted"
    assert done.summary["updates"] >= 3
    assert (done.summary["servers_lost"], done.summary["servers_restarted"]) == ({}, 1)
    assert f"student server {url} is lost, the run goes on with 0: " in done.output
    assert f"student server {url} is back after " in done.output
    assert (done.run_dir / "logs" / "student-0.restart1.log").exists()
    accounted = ("samples_consumed", "samples_in_flight")
    assert sum(done.summary[key] for key in accounted) == done.summary["samples_admitted"]
    assert "Traceback" not in done.output


def test_a_learner_that_is_killed_continues_from_its_checkpoint_and_ends_a_run_without_restarts(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    """The student server is the run's own, the teacher is not."""
    running = start(
        write_config(
            inputs,
            tmp_path,
            run={"max_steps": 5000},
            checkpoint={"every": 4, "every_minutes": 0},
            learner={"max_restarts": 1},
            teacher=shared["teacher"],
        )
    )
    running.wait_until(lambda: running.has_updated() and running.updates() >= 6)
    killed_at = running.updates()
    running.kill_a_rank()
    running.wait_until(lambda: (running.run_dir / "logs" / "learner.restart1.log").exists())
    running.wait_until(lambda: running.updates() >= killed_at + 4)
    rows = [json.loads(row) for row in (running.run_dir / "metrics.jsonl").open()]
    assert [row["update"] for row in rows] == list(range(len(rows))), "none is missing or twice"
    recorded = [json.loads(row) for row in (running.run_dir / "rollouts.jsonl").open()]
    assert len(recorded) >= len(rows) > 8
    told = {(row["update"], row["uid"]) for row in recorded}
    assert len(told) == len(recorded), "rows of updates that were taken back are gone"
    # another run must not touch a live one's directory
    second = [sys.executable, "-m", "megatron_opd", "run", str(tmp_path / "config.yaml")]
    refused = subprocess.run([*second, "--overwrite"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert f"is held by pid {running.process.pid} on " in refused.stderr
    assert running.has_updated()
    running.kill_a_rank()  # its second restart within an hour would be one too many
    done = running.finish(60)
    assert done.code == 1, done.output
    summary = done.summary
    assert (summary["status"], summary["learner_restarts"]) == ("failed", 1)
    assert "learner" in summary["cause"]
    assert 0 <= summary["updates_rolled_back"] < 4 + 4
    drops = sum(summary["samples_dropped"].values())
    assert summary["samples_admitted"] == (
        summary["samples_consumed"] + summary["samples_in_flight"] + drops
    )
    assert "the learner is up, and continues from update " in done.output
    error = [line for line in done.output.splitlines() if line.startswith("error:")]
    assert len(error) == 1
    assert "learner" in error[0]
    assert "Traceback" not in done.output
