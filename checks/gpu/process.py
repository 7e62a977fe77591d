"""A command with a time limit, after which nothing of its process group is left."""

from __future__ import annotations

import math
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_bridge.server.launch import signal_group

# Within it opd run ends its servers and its learner once it is told to stop.
GRACE_S = 15.0
LAST_LINES = 20
POLL_S = 0.1


@dataclass(frozen=True)
class Ended:
    """exit_code: None where the limit ended it."""

    exit_code: int | None
    seconds: float
    last_lines: tuple[str, ...]


def run(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run `command` with its output in `log`, for at most `limit_s`."""
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            start_new_session=True,
        )
    try:
        exit_code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        exit_code = None
    finally:
        _end_group(process)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return Ended(exit_code, time.monotonic() - started, tuple(lines[-LAST_LINES:]))


def echoed(
    command: Sequence[str], interrupt_after_s: float = math.inf
) -> tuple[int, tuple[str, ...]]:
    """Run a command inside a part, whose limit holds for it too: (exit code, its last lines).

    interrupt_after_s: it gets SIGINT then, and may still say what it found.
    """
    # a job that a shell put into the background ignores SIGINT, and so would all that it starts
    hears = ("env", "--default-signal=INT", *command)
    process = subprocess.Popen(
        hears, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    last: deque[str] = deque(maxlen=LAST_LINES)
    assert process.stdout is not None
    late = threading.Timer(interrupt_after_s, process.send_signal, [signal.SIGINT])
    if math.isfinite(interrupt_after_s):
        late.start()
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            last.append(line.rstrip())
        return process.wait(), tuple(last)
    finally:
        late.cancel()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM what runs, so that it can end what it started itself; SIGKILL what is left."""
    deadline_s = time.monotonic() + GRACE_S
    if signal_group(process.pid, signal.SIGTERM):
        while signal_group(process.pid, 0) and time.monotonic() < deadline_s:
            process.poll()
            time.sleep(POLL_S)
        signal_group(process.pid, signal.SIGKILL)
    process.wait()
