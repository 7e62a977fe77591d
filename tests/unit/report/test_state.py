"""The state of a run, from its summary and the holder of its lock."""

import os
import socket
import subprocess
import sys
import time

import pytest

from megatron_opd.checkpoint.run_lock import Holder
from megatron_opd.report.state import run_state


def holder(pid: int, *, host: str | None = None, started: str | None = None) -> Holder:
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return Holder(pid, host or socket.gethostname(), started or now, "ab" * 16)


@pytest.fixture
def ended() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted", "preempted"])
def test_a_summary_names_the_state(status: str):
    found = run_state({"status": status, "cause": "disk full"}, None)
    assert (found.state, found.why) == (status, "disk full")


@pytest.mark.parametrize("summary", [{}, {"status": "finnished"}, {"status": ["finished"]}])
def test_a_summary_without_a_known_status_is_no_state(summary: dict):
    assert run_state(summary, None).state == "unknown"


def test_a_run_whose_controller_lives_is_running():
    assert run_state(None, holder(os.getpid())).state == "running"


def test_a_run_that_is_started_again_is_running_whatever_its_old_summary_says():
    assert run_state({"status": "preempted"}, holder(os.getpid())).state == "running"


def test_a_run_whose_controller_is_gone_crashed(ended: int):
    assert run_state(None, holder(ended)).state == "crashed"
    assert run_state(None, None).state == "crashed"
    assert run_state({"status": "failed"}, holder(ended)).state == "failed"


def test_a_later_process_with_the_same_number_is_not_the_controller():
    found = run_state(None, holder(os.getpid(), started="2020-01-01 00:00:00 +0000"))
    assert found.state == "crashed"


def test_a_controller_on_another_machine_cannot_be_seen(ended: int):
    found = run_state(None, holder(ended, host="elsewhere"))
    assert found.state == "unknown"
    assert "elsewhere" in found.why
