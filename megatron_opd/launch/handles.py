"""Declares what a run needs of its servers and its learner, on this machine or on another.

Here they are child processes (sglang_bridge/server/launch.py, launch/learner_process.py), elsewhere
what a launcher starts (launch/remote.py). Methods may block, so asyncio calls all but exit_code in
threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class ServerHandle(Protocol):
    """Runs one SGLang server."""

    @property
    def url(self) -> str:
        """Returns where clients reach it."""
        ...

    @property
    def name(self) -> str:
        """Returns what messages call it."""
        ...

    @property
    def log_path(self) -> Path:
        """Returns the file with its output."""
        ...

    def start(self) -> None:
        """Start it. PortInUse: something listens at its port."""
        ...

    def wait_ready(self, timeout_s: float) -> None:
        """Return once it answers. ServerDied: it ended, or took longer. PortInUse: as above."""
        ...

    def exit_code(self) -> int | None:
        """Return its exit code, None while it runs; it does not block."""
        ...

    def cause(self) -> str | None:
        """Return what ended it, in words: one of its own processes, a lost node; else None."""
        ...

    def stop(self, grace_s: float) -> None:
        """End it and all that it started. Safe to repeat."""
        ...

    def again(self) -> ServerHandle:
        """Return one like this, not started, with a log of its own; maybe at another address."""
        ...


class LearnerHandle(Protocol):
    """Runs the world of the learner's ranks."""

    @property
    def log(self) -> Path | None:
        """Returns the file with the output of the first ranks."""
        ...

    def start(self) -> None:
        """Start all ranks."""
        ...

    def exit_code(self) -> int | None:
        """Return the exit code of what ended first, None while all run; it does not block."""
        ...

    def cause(self) -> str | None:
        """Return what ended it, in words, where its own log cannot tell; else None."""
        ...

    def stop(self, grace_s: float) -> None:
        """End all ranks. Safe to repeat."""
        ...

    def again(self) -> LearnerHandle:
        """Return a world like this, not started, with a log of its own; maybe on other nodes."""
        ...
