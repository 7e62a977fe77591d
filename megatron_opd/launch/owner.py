"""Holds one process of a run on its node, for a controller on another machine.

Invariant: the process and all that it starts end with whoever holds the Owner (guard.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

READ_BYTES = 1 << 20
POLL_S = 0.2
START_S = 60.0
AFTER_GRACE_S = 30.0
"""Longest wait in seconds for killed processes to be gone."""


class Owner:
    """Starts one process, reads its output and ends it. Thread-safe.

    Its output lies in a file without a name, so that nothing is left of it in any case.
    """

    def __init__(self) -> None:
        self._guard: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._started, self._ended = threading.Event(), threading.Event()
        self._code: int | None = None
        self._error: str | None = None

    def start(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Start this Python with `arguments`. RuntimeError: it cannot be started."""
        assert self._guard is None, "an Owner runs one process"
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "megatron_opd.launch.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        threading.Thread(target=self._listen, name="guard", daemon=True).start()
        self._order(json.dumps({"arguments": [sys.executable, *arguments], "env": dict(env)}))
        if not self._started.wait(START_S) or self._error is not None:
            raise RuntimeError(self._error or f"it did not start within {START_S:g} s")

    def read(self, offset: int, wait_s: float) -> tuple[bytes, int | None]:
        """Return output from `offset` on, and the exit code once all output has been read.

        Waits for either, at most `wait_s`.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            ended = self._ended.is_set()  # before reading: there is no output after it
            data = os.pread(self._log.fileno(), READ_BYTES, offset)
            if data or ended or time.monotonic() >= deadline_s:
                return data, self._code if ended and not data else None
            self._ended.wait(POLL_S)

    def stop(self, grace_s: float) -> None:
        """End it and all that it started: SIGTERM, and SIGKILL after `grace_s`."""
        if self._guard is None or self._ended.is_set():
            return
        self._order(f"stop {grace_s:g}")
        if not self._ended.wait(grace_s + AFTER_GRACE_S):
            raise RuntimeError(f"it did not end within {grace_s + AFTER_GRACE_S:g} s")

    def _order(self, line: str) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(line.encode() + b"\n")
            self._guard.stdin.flush()
        except BrokenPipeError:
            pass  # the guard has just ended, which _listen tells

    def _listen(self) -> None:
        """Note what the guard reports; without a report the guard itself was killed."""
        assert self._guard is not None
        assert self._guard.stdout is not None
        for line in self._guard.stdout:
            event = json.loads(line)
            self._error = event.get("error")
            self._code = event.get("code")
            if "code" not in event:
                self._started.set()
        self._guard.wait()
        if self._code is None:
            self._code, self._error = -9, self._error or "its guard ended"
        self._ended.set()
        self._started.set()
