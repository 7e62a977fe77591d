"""Fills a directory in units that a later run can continue; it appears complete or not at all.

While it is filled it is called `NAME.part`. A unit counts as done once its record is there, and the
record is written after the unit's data is on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

_PLAN = "plan.json"
_RECORDS = "units"


class PartDir:
    """Fills one directory, which a later run with the same plan can continue.

    `plan`: what is made from what, as JSON.
    """

    def __init__(self, target: Path, plan: dict[str, Any]) -> None:
        self.target, self.plan = target.absolute(), plan
        self.path = self.target.with_name(f"{self.target.name}.part")
        self._state = self.path / ".opd"

    def open(self) -> None:
        """Make it, or accept an earlier run's. ValueError: it is complete, or of another plan."""
        if self.target.exists():
            raise ValueError(f"{self.target} exists already; remove it or choose another directory")
        plan = self._state / _PLAN
        if self.path.exists():
            found = json.loads(plan.read_text(encoding="utf-8")) if plan.is_file() else None
            if found != self.plan:
                raise ValueError(
                    f"{self.path} is left from another conversion; remove it to start this one"
                )
            return
        (self._state / _RECORDS).mkdir(parents=True)
        write_synced(plan, json.dumps(self.plan))

    def need_space(self, num_bytes: int) -> None:
        """Raise ValueError when the disk cannot hold this many bytes."""
        free = shutil.disk_usage(self.path).free
        if num_bytes > free:
            raise ValueError(
                f"disk full: {self.target} needs {num_bytes / 1e9:.2f} GB more, "
                f"{free / 1e9:.2f} GB are free"
            )

    def record(self, unit: int) -> dict[str, Any] | None:
        """Return what `done` recorded of a unit; None: it is still to do."""
        file = self._state / _RECORDS / f"{unit}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def done(self, unit: int, record: dict[str, Any]) -> None:
        """Mark a unit whose data is on the disk."""
        write_synced(self._state / _RECORDS / f"{unit}.json", json.dumps(record))

    def publish(self) -> None:
        """Give the complete directory its name."""
        shutil.rmtree(self._state)
        self.path.rename(self.target)
        sync_directory(self.target.parent)


def write_synced(file: Path, content: str | bytes) -> None:
    """Write a file that exists whole or not at all, also after a power cut."""
    part = file.with_name(f".{file.name}.part")
    with part.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())
    part.rename(file)
    sync_directory(file.parent)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
