"""Writes figures to files, which are complete after every update: a killed run keeps them."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

RESERVED_BYTES = 65_536
"""Space in bytes reserved for one summary: a demo's takes 3 kB."""


EVALUATIONS = "evaluations.jsonl"
"""Name of the file of evaluations, beside metrics.jsonl."""


class Sink(Protocol):
    """Takes one row of figures per learner update, and one per evaluated set.

    metrics/catalogue.py describes what rows can hold.
    """

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Record the row of `update` (0-based)."""
        ...

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Record the figures of one set; `update` and `set` are in the row."""
        ...

    def close(self) -> None:
        """Finish writing; safe to call twice."""
        ...


class JsonlSink:
    """Writes metrics.jsonl: one JSON object per line, written at once; NaN becomes null.

    The first evaluation makes evaluations.jsonl beside it, of the same form.
    """

    def __init__(self, path: Path) -> None:
        self._evaluations_path = path.with_name(EVALUATIONS)
        self._file, self._evaluations = RowFile(path), None

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Append one line; `update` is in the row already."""
        self._file.append(_line(row))

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Append one line to the evaluations."""
        if self._evaluations is None:
            self._evaluations = RowFile(self._evaluations_path)
        self._evaluations.append(_line(row))

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._evaluations is not None:
            self._evaluations.close()


class RowFile:
    """Appends whole rows to a file: a row that does not fit on the disk is not written at all."""

    def __init__(self, path: Path) -> None:
        # unbuffered: what could not be written is not tried again when the file is closed
        self._file = path.open("ab", buffering=0)

    def append(self, row: bytes) -> None:
        """Write one row. OSError: the disk is full, or the file has reached its limit."""
        before = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(row) != len(row):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file.name))
        except OSError:
            self._file.truncate(before)
            raise

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(json_ready(row), allow_nan=False) + "\n").encode()


def json_ready(value: Any) -> Any:
    """Return `value` with numpy scalars and non-finite floats turned into what JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    if hasattr(value, "item"):
        return json_ready(value.item())
    return str(value)


def reserve_json(path: Path) -> None:
    """Reserve disk space, so that `write_json` can write `path` even if the disk is full by then.

    OSError: there is none.
    """
    with _reserved(path).open("wb") as stream:
        stream.write(b" " * RESERVED_BYTES)
        os.fsync(stream.fileno())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` in one step: a reader sees the old file or the new one, never a part."""
    temporary, reserved = path.with_name(f".{path.name}.{os.getpid()}"), _reserved(path)
    content = (json.dumps(json_ready(value), indent=2, allow_nan=False) + "\n").encode()
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
        reserved.unlink(missing_ok=True)
    except OSError:
        temporary.unlink(missing_ok=True)  # no other process uses this name
        if not (reserved.exists() and len(content) <= reserved.stat().st_size):
            raise
        with reserved.open("r+b") as stream:  # in place: these blocks are ours already
            stream.write(content)
            stream.truncate()
        reserved.replace(path)


def _reserved(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")
