"""Holds one process and all that it starts, directly or not, and ends them together (Linux).

Invariant: once `end` returns none is left. The program that holds a tree adopts the orphans of it,
so none escapes; if that program itself is killed, its child ends, and what follows its parent too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial

import psutil

from sglang_bridge.lifetime import adopt_orphans, signal_at_end_of_parent

POLL_S = 0.02


class Tree:
    """Starts a process in a session of its own; this program must have no other children.

    out: descriptor of its output; None: this program's own. code: its exit code once it has ended,
    negative for a signal. OSError: it cannot be started.
    """

    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str], out: int | None = None
    ) -> None:
        adopt_orphans()
        self._root = subprocess.Popen(
            arguments,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=partial(signal_at_end_of_parent, signal.SIGKILL),
        )
        self.pid = self._root.pid
        self.code: int | None = None

    def reap(self) -> None:
        """Collect what has ended, and note the process's exit code."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self.pid:
                    self.code = self._root.returncode = os.waitstatus_to_exitcode(ended[1])

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to the process's group, and SIGKILL after `grace_s` to whatever is left.

        What a process that has ended leaves behind is killed at once.
        """
        deadline_s = time.monotonic() + grace_s
        self.reap()
        if self.code is None and grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            while self._left() and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
        while left := self._left():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(POLL_S)

    def _left(self) -> list[psutil.Process]:
        self.reap()
        return psutil.Process().children(recursive=True)
