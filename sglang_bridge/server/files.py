"""Removes what a killed server leaves on the machine: its sockets and shared memory.

A server's sockets lie in a directory that only its user can enter, and its shared memory is named
after that directory or after one of its processes. So what is removed is certainly its own.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
OBITUARY = "obituary"


def make() -> str:
    """Makes a new directory for one server's files."""
    return tempfile.mkdtemp(prefix="opd-server-")


def remove(directory: str | None, pids: Iterable[int]) -> None:
    """Removes a server's files. pids: of its processes, which have ended or are about to."""
    if directory is not None:
        remove_shared_memory(directory, pids)
        shutil.rmtree(directory, ignore_errors=True)


def remove_shared_memory(directory: str, pids: Iterable[int]) -> None:
    """Removes what a server, given by its processes' ids, has in shared memory."""
    patterns = [f"sglang_loads_{Path(directory).name}_*.shm"]
    patterns += [f"sgl_shm_*_{pid}_*" for pid in pids]
    for pattern in patterns:
        for left in SHARED_MEMORY.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                left.unlink()


def write_obituary(directory: str, cause: str) -> None:
    """Records why a server ended, for whoever started it."""
    with contextlib.suppress(OSError):
        (Path(directory) / OBITUARY).write_text(cause, encoding="utf-8")


def obituary(directory: str | None) -> str | None:
    """Returns what `write_obituary` left, or None."""
    if directory is None:
        return None
    try:
        return (Path(directory) / OBITUARY).read_text(encoding="utf-8")
    except OSError:
        return None
