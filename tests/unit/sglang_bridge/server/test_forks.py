"""Forks of a preloaded process, which has imported next to nothing here, and do what is said."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_bridge.server import forks
from sglang_bridge.server.forks import Forked, Preloaded, preload, preloaded, start_server
from sglang_bridge.server.spec import API_KEY_VARIABLE, PRELOADED_VARIABLE

PROGRAM = "tests.support.forking"
COMMAND = ("python", "-m", "forked", "--an-option-of-a-command-line-as-long-as-a-server's-is=1")
LIMIT_S = 60


@pytest.fixture
def below(monkeypatch: pytest.MonkeyPatch) -> Iterator[Preloaded]:
    """A preloaded process that imported nothing of SGLang's."""
    monkeypatch.setattr(forks, "_below", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # numpy's threads
    found = preload(dict(os.environ), PROGRAM)
    yield found
    found.close()


def wait_for(log: Path, text: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while text not in log.read_text() and time.monotonic() < deadline_s:
        time.sleep(0.02)


def told(log: Path) -> dict[str, Any]:
    return json.loads(log.read_text().splitlines()[0])


def start(log: Path, what: str, **env: str) -> forks.ServerChild:
    with log.open("wb") as output:
        return start_server([*COMMAND, what], {**os.environ, **env}, output)


def test_a_fork_is_a_child_in_a_session_of_its_own_with_what_was_ordered(
    below: Preloaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    process = start(tmp_path / "log", "7", **{API_KEY_VARIABLE: "a key"})
    assert isinstance(process, Forked)
    assert process.wait() == process.poll() == 7
    found = told(tmp_path / "log")
    assert (found["pid"], found["parent"], found["session"]) == (
        process.pid,
        os.getpid(),
        process.pid,
    )
    assert found["command"] == found["shown"] == [*COMMAND, "7"]
    assert found["directory"] == str(tmp_path)
    assert found["input"] == ""
    ordered = {**os.environ, API_KEY_VARIABLE: "a key", "SET_BY_IMPORTS": "1"}
    assert found["env"] == ordered, "and nothing else"
    assert "goodbye" in (tmp_path / "log").read_text(), "what is registered for the end is done"


def test_a_fork_can_be_signalled_as_a_group_as_soon_as_its_id_is_known(
    below: Preloaded, tmp_path: Path
):
    for _ in range(10):
        process = start(tmp_path / "log", "0")
        assert os.getpgid(process.pid) == os.getsid(process.pid) == process.pid
        process.wait()


def test_each_fork_draws_numbers_and_keys_of_its_own(below: Preloaded, tmp_path: Path):
    logs = [tmp_path / str(number) for number in range(2)]
    for process in [start(log, "0") for log in logs]:
        assert process.wait() == 0
    one, two = (told(log)["drawn"] for log in logs)
    assert len(one) == len({*one, *two}) / 2 == 3


def test_the_end_of_the_preloaded_process_costs_nothing(below: Preloaded, tmp_path: Path):
    process = start(tmp_path / "log", "sleep")
    wait_for(tmp_path / "log", "shown")
    assert below.process is not None
    below.process.kill()
    below.process.wait()
    assert process.poll() is None
    assert psutil.Process(process.pid).ppid() == os.getpid()
    later = start(tmp_path / "later", "0")
    assert isinstance(later, subprocess.Popen), "spawned"
    later.wait()
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_what_imports_have_read_otherwise_is_spawned(
    below: Preloaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    command = [sys.executable, "-c", "import os; print(os.environ['READ'])"]
    with (tmp_path / "log").open("wb") as log:
        process = start_server(command, {**os.environ, "READ": "this"}, log)
    assert isinstance(process, subprocess.Popen)
    assert process.wait() == 0
    assert (tmp_path / "log").read_text() == "this\n"
    assert "spawned and not forked: imports have read other values of READ" in caplog.text


def test_a_process_with_threads_forks_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(forks, "_below", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = preload(dict(os.environ), PROGRAM)
    assert isinstance(start(tmp_path / "log", "pass"), subprocess.Popen)
    assert "not forked: it has 2 threads" in caplog.text
    found.close()


def test_only_the_process_that_preloaded_orders(below: Preloaded):
    assert preloaded() is below
    code = "from sglang_bridge.server.forks import preloaded; print(preloaded())"
    environment = os.environ | {PRELOADED_VARIABLE: f"{os.getpid()}:3"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "None\n", done.stderr


OWNER = f"""
import os, sys, time
from sglang_bridge.server import forks
env = {{**os.environ, "OMP_NUM_THREADS": "1"}}
below = forks.preload(env, {PROGRAM!r})
with open(sys.argv[1], "wb") as log:
    process = forks.start_server(["python", "-c", "end with the parent"], env, log)
print(type(process).__name__, below.process.pid, process.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_owner_leaves_neither(tmp_path: Path):
    """What was forked asks Linux for its end before it says what it is."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        kind, *pids = owner.stdout.readline().split()
        assert kind == "Forked"
        both = [psutil.Process(int(pid)) for pid in pids]
        wait_for(tmp_path / "log", "shown")
        owner.kill()
    assert psutil.wait_procs(both, timeout=LIMIT_S)[1] == []
