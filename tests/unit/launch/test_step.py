"""What runs a process on a node: its GPUs, its end, and the end of all that it started."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_opd.launch.step import main, narrow

# Starts a process in a session of its own that is nobody's child by then, as a daemon; neither
# heeds SIGTERM.
FAMILY = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writing, str(os.getpid()).encode())
        time.sleep(600)
    os._exit(0)
os.wait()
print(os.read(reading, 100).decode(), os.getpid(), flush=True)
while True:
    time.sleep(600)
"""
STEP = [sys.executable, "-m", "megatron_opd.launch.step"]


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*STEP, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A step with a child and a daemon below it; the daemon first."""
    (tmp_path / "family.py").write_text(FAMILY)
    step = start("--grace-s", "0.3", "--", str(tmp_path / "family.py"))
    assert step.stdout is not None
    members = [psutil.Process(int(pid)) for pid in step.stdout.readline().split()]
    yield step, members
    if step.poll() is None:
        step.kill()
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    step.wait()


def ended(step: subprocess.Popen[str]) -> tuple[str, int]:
    """What it printed, and its exit code; its input stays open until then."""
    assert step.stdout is not None
    return step.stdout.read(), step.wait(20)


def gone(processes: list[psutil.Process], timeout: float = 20) -> bool:
    return not psutil.wait_procs(processes, timeout=timeout)[1]


def test_its_exit_code_is_the_processs():
    step = start("--", "-c", "print('here'); raise SystemExit(7)")
    assert ended(step) == ("here\n", 7)
    step = start("--", "-c", "import os; os.kill(os.getpid(), 9)")
    assert ended(step) == ("", 128 + signal.SIGKILL)


def test_a_line_ends_everything_in_its_seconds(family):
    step, members = family
    out, _ = step.communicate("1.5\n")
    assert out == "told\n"  # before it was killed
    assert gone(members, 0)
    assert step.returncode == 128 + signal.SIGKILL


def test_the_end_of_whoever_holds_its_input_ends_everything(family):
    step, members = family
    step.stdin.close()
    assert gone([*members, psutil.Process(step.pid)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(family, number: signal.Signals):
    step, members = family
    step.send_signal(number)
    step.wait(20)
    assert gone(members, 0)


def test_no_seconds_are_none(family):
    step, members = family
    assert step.communicate("0\n", timeout=20)
    assert gone(members, 0)


def test_what_outlives_the_process_is_ended(tmp_path: Path):
    (tmp_path / "family.py").write_text(FAMILY.replace("while True:", "raise SystemExit(3)\nif 0:"))
    step = start("--", str(tmp_path / "family.py"))
    out, code = ended(step)
    daemon, _ = map(int, out.split())
    assert code == 3
    assert not psutil.pid_exists(daemon)


def test_its_child_does_not_outlive_its_being_killed(family):
    step, (daemon, child) = family
    step.kill()
    assert gone([child])
    daemon.kill()  # Slurm's own business, or a server's, which watches its parent


@pytest.mark.parametrize(
    ("gpus", "visible", "seen"),
    [
        ((2, 3), "0,1,2,3", "2,3"),
        ((1,), "4,6", "6"),  # of a node where Slurm gave two
        ((0,), "GPU-8a,GPU-9b", "GPU-8a"),
        ((2,), None, "2"),
        ((), "4,6", "4,6"),
    ],
)
def test_its_gpus_are_counted_within_those_of_the_node(
    gpus: tuple[int, ...], visible: str | None, seen: str
):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    narrow(environment, gpus)
    assert environment["CUDA_VISIBLE_DEVICES"] == seen


def test_gpus_that_the_node_lacks(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(["--gpus", "1,2", "--", "-c", "pass"]) == 2
    err = capsys.readouterr().err
    assert "GPU 2 of the node is reserved for this process, but CUDA_VISIBLE_DEVICES lists 2" in err
    assert err.count("\n") == 1
