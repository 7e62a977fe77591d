"""Trees of processes that are hard to end, and whether they are gone."""

import time
from pathlib import Path

import psutil

# Writes its id to DIRECTORY/0, and starts a child and a grandchild that do alike; each ignores
# SIGTERM in a session of its own. With a further argument the first exits with code 3.
STUBBORN = """
import os, signal, subprocess, sys, time
directory, *rest = sys.argv[1:]
level = int(os.environ.get("LEVEL", "0"))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if level:
    os.setsid()
if level < 2:
    code = open("/proc/self/cmdline").read().split(chr(0))[2]
    env = {**os.environ, "LEVEL": str(level + 1)}
    subprocess.Popen([sys.executable, "-c", code, directory], env=env)
path = os.path.join(directory, str(level))
open(path + ".new", "w").write(str(os.getpid()))
os.rename(path + ".new", path)
while rest and not os.path.exists(os.path.join(directory, "2")):
    time.sleep(0.02)
if rest:
    sys.exit(3)
time.sleep(600)
"""


def pids_in(directory: Path, count: int, timeout_s: float = 60.0) -> list[int]:
    """The process ids that a STUBBORN tree writes, the root's first."""
    files, deadline_s = [directory / str(level) for level in range(count)], _in(timeout_s)
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline_s, sorted(directory.iterdir())
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def wait_gone(pids: list[int], timeout_s: float = 30.0) -> None:
    """Wait until none of the processes exists."""
    deadline_s = _in(timeout_s)
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def words_of(process: psutil.Process) -> list[str]:
    """The arguments of a process, which everybody may read."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def lives(pid: int) -> bool:
    """Whether there is such a process that is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _in(seconds: float) -> float:
    return time.monotonic() + seconds
