"""A rank must not outlive the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "MEGATRON_OPD_PARENT"
"""Process id of the parent, for a child to notice that it ended while the child's Python started:
seconds, in which nothing here has been called yet."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """On Linux: the kernel sends SIGTERM to this process when its parent ends, however it ends.

    Exits at once when the parent that PARENT_VARIABLE names has ended already.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = int(os.environ.pop(PARENT_VARIABLE, os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, has ended")
