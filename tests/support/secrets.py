"""Looks for a run's secrets where they must not be."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_opd.wire.keys import RunKeys


def secrets_in(file: Path) -> list[str]:
    """What a run's file of keys holds, each of it a secret."""
    keys = RunKeys.read(file)
    assert keys is not None, f"there is no {file}"
    return [keys.controller.decode(), keys.learner.decode(), *keys.servers.values()]


def found_in(directory: Path, secrets: Sequence[str]) -> list[Path]:
    """The files below `directory` that hold one of them."""
    wanted = [secret.encode() for secret in secrets]
    return [
        path
        for path in directory.rglob("*")
        if path.is_file() and any(secret in path.read_bytes() for secret in wanted)
    ]


def all_arguments(pid: int) -> str:
    """The command lines of a process and its descendants, which every user may read."""
    root = psutil.Process(pid)
    lines: list[str] = []
    for each in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended; ZombieProcess is one
            lines.append(" ".join(each.cmdline()))
    return "\n".join(lines)
