"""Writes figures to files, which are complete after every update: a killed run keeps them."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

RESERVED_BYTES = 65_536
"""Space in bytes reserved for one summary: a demo's takes 3 kB."""


class Sink(Protocol):
    """Takes one row of figures per learner update, and one per evaluated set."""

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Record the row of `update` (0-based)."""
        ...

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Record the evaluation of one held-out set; `update` is how many its weights had seen."""
        ...

    def close(self) -> None:
        """Finish writing; safe to call twice."""
        ...


class JsonlSink:
    """Writes metrics.jsonl, and evaluations.jsonl beside it once there is an evaluation.

    One JSON object per line, written at once; NaN becomes null.
    """

    def __init__(self, path: Path) -> None:
        self._file = RowFile(path)
        self._evaluations = path.with_name("evaluations.jsonl")
        self._evaluated: RowFile | None = None

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Append one line; `update` is in the row already."""
        self._file.append(_line(row))

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Append one line to evaluations.jsonl."""
        if self._evaluated is None:
            self._evaluated = RowFile(self._evaluations)
        self._evaluated.append(_line(row))

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._evaluated is not None:
            self._evaluated.close()


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(json_ready(row), allow_nan=False) + "\n").encode()


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


class TensorBoardSink:
    """Writes scalars into an event file, one tag per column, without torch or TensorFlow.

    Written by the caller's own thread: TensorBoard's EventFileWriter prints a traceback from its
    thread when the disk is full.
    """

    def __init__(self, directory: Path) -> None:
        # the import alone takes 0.3 s; runs without TensorBoard need not pay it
        from tensorboard.compat.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
        )

        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = RowFile(directory / name)
        self._add(Event(wall_time=now, file_version="brain.Event:2"))

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Add every finite number of the row at step `update`."""
        self._write(update, "opd", row)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Add every finite number of an evaluation, pass@k by k, under the set's name."""
        passes = {f"pass_at_{k}": value for k, value in row.get("pass_at_k", {}).items()}
        self._write(row["update"], f"eval/{row['set']}", {**row, **passes})

    def _write(self, step: int, prefix: str, row: Mapping[str, Any]) -> None:
        # protobuf makes these classes at import
        from tensorboard.compat.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboard.compat.proto.summary_pb2 import (
            Summary,  # pyright: ignore[reportAttributeAccessIssue]
        )

        values = [
            Summary.Value(tag=f"{prefix}/{tag}", simple_value=float(value))
            for tag, value in row.items()
            if isinstance(value, int | float) and math.isfinite(value)
        ]
        event = Event(step=step, summary=Summary(value=values))
        # wall_time is what TensorBoard's time axis shows; rows carry it when they have it
        event.wall_time = float(row.get("unix_time_s", 0.0))
        self._add(event)

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        framed = io.BytesIO()
        RecordWriter(framed).write(event.SerializeToString())
        self._file.append(framed.getvalue())


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
