"""Lets a process tell of itself: one line of JSON on standard output for each SIGUSR1."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys


def answer_signal() -> None:
    """Answer SIGUSR1 with the number of asyncio tasks; call inside the event loop."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, say, "tasks")


def say(event: str, **figures: object) -> None:
    """Write one line; lines of several processes into one pipe do not mix."""
    said = {"event": event, "pid": os.getpid(), "tasks": len(asyncio.all_tasks()), **figures}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
