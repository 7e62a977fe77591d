"""Ends a rank together with the process that started it, and by no signal meant for that one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PARENT_VARIABLE = "MEGATRON_OPD_PARENT"
"""Environment variable with the parent's process id, so that a child notices a parent that ended
while the child's Python was still starting."""
EXIT_LOST = 3
"""What a rank exits with because its controller, or the way to it, is gone."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)  # opened here, as a fork of a program with threads may call it
_ADOPTING = threading.Lock()


def die_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process when its parent ends, in whatever way.

    Exits at once when the parent that PARENT_VARIABLE names has already ended. SIGUSR1, which a
    scheduler may send to every process of a job, is the controller's to answer.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if not sys.platform.startswith("linux"):
        return
    parent = int(os.environ.pop(PARENT_VARIABLE, os.getppid()))
    signal_at_end_of_parent(signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, has ended")


def signal_at_end_of_parent(number: int) -> None:
    """Let Linux send this process a signal once the thread that started it has ended.

    A parent that ended before the call is not noticed: compare os.getppid().
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Let Linux make this process the parent of those below it that lose theirs, from now on."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Lets Linux make this process, meanwhile, the parent of those below it that lose theirs."""
    with _ADOPTING:
        adopt_orphans()
        try:
            yield
        finally:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)
