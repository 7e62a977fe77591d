"""A process and all that it starts end with whoever owns it; its output reaches the owner."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_opd.launch.owner import Owner
from tests.support.trees import STUBBORN, pids_in, wait_gone

# Owns a tree as a node does, and says so; then it waits to be killed.
HOLDER = """
import os, sys, time
from megatron_opd.launch.owner import Owner
owner = Owner()
owner.start(sys.argv[1:], os.environ)
print("started", flush=True)
time.sleep(600)
"""


def output_of(owner: Owner, timeout_s: float = 20.0) -> tuple[str, int]:
    """All output, and the exit code."""
    output, code, deadline_s = b"", None, time.monotonic() + timeout_s
    while code is None:
        assert time.monotonic() < deadline_s, output
        data, code = owner.read(len(output), 0.5)
        output += data
    return output.decode(), code


def test_output_environment_and_exit_code_come_back():
    owner = Owner()
    code = "import os, sys; print(os.environ['WORD'], flush=True); sys.exit('failed')"
    owner.start(["-c", code], {"WORD": "secret"})
    assert output_of(owner) == ("secret\nfailed\n", 1)
    owner.stop(1.0)


def test_output_that_is_longer_than_a_read_comes_in_pieces():
    owner = Owner()
    owner.start(["-c", "print('x' * 3_000_000)"], {})
    first, code = owner.read(0, 20.0)
    assert 0 < len(first) <= 1 << 20
    assert code is None
    assert output_of(owner) == ("x" * 3_000_000 + "\n", 0)


def test_what_cannot_be_started_is_said():
    owner = Owner()
    with pytest.raises(RuntimeError, match="Argument list too long"):
        owner.start(["-c", "x" * 3_000_000], {})


def test_stop_ends_a_tree_that_ignores_sigterm_and_has_sessions_of_its_own(tmp_path: Path):
    owner = Owner()
    owner.start(["-c", STUBBORN, str(tmp_path)], os.environ)
    pids = pids_in(tmp_path, 3)
    owner.stop(0.3)
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "stop returned before their end"
    assert output_of(owner)[1] == -signal.SIGKILL
    owner.stop(0.3)


def test_a_process_that_ends_takes_what_it_has_left_with_it(tmp_path: Path):
    owner = Owner()
    owner.start(["-c", STUBBORN, str(tmp_path), "leave"], os.environ)
    assert output_of(owner)[1] == 3
    wait_gone(pids_in(tmp_path, 3))


def test_sigterm_gives_it_time_to_end_by_itself(tmp_path: Path):
    owner = Owner()
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    owner.start(["-c", code], os.environ)
    assert owner.read(0, 20.0)[0] == b"ready\n"
    owner.stop(20.0)
    assert output_of(owner)[1] == 5


@pytest.mark.parametrize("victim", ["owner", "guard"])
def test_the_tree_ends_with_its_owner_and_with_its_guard(tmp_path: Path, victim: str):
    command = [sys.executable, "-c", HOLDER, "-c", STUBBORN, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"started\n"
        pids = pids_in(tmp_path, 3)
        root = psutil.Process(pids[0])
        guard = root.parent()
        assert guard is not None
        assert "megatron_opd.launch.guard" in guard.cmdline()
        (guard.send_signal if victim == "guard" else holder.send_signal)(
            signal.SIGTERM if victim == "guard" else signal.SIGKILL
        )
        wait_gone([*pids, guard.pid])
        holder.kill()
