"""Where numbers are written. Files are complete after every update: a killed run keeps them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Takes one row of figures per learner update."""

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Record the row of `update` (0-based)."""
        ...

    def close(self) -> None:
        """Finish; idempotent."""
        ...


class JsonlSink:
    """metrics.jsonl: one JSON object per line, flushed at once; not-a-number becomes null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Append one line; `update` is in the row already."""
        self._file.write(json.dumps(json_ready(row), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Scalars into an event file, one tag per numeric column, without torch or TensorFlow."""

    def __init__(self, directory: Path) -> None:
        # the import alone takes 0.3 s; runs without TensorBoard need not pay it
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(directory))

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Add every finite number of the row at step `update`."""
        # protobuf makes these classes at import
        from tensorboard.compat.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboard.compat.proto.summary_pb2 import (
            Summary,  # pyright: ignore[reportAttributeAccessIssue]
        )

        scalars = {
            tag: float(value)
            for tag, value in row.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        values = [
            Summary.Value(tag=f"opd/{tag}", simple_value=value) for tag, value in scalars.items()
        ]
        event = Event(step=update, summary=Summary(value=values))
        # wall_time is what TensorBoard's time axis shows; rows carry it when they have it
        event.wall_time = float(row.get("unix_time_s", 0.0))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def json_ready(value: Any) -> Any:
    """`value` with numpy scalars and non-finite floats turned into what JSON can hold."""
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


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` in one step: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps(json_ready(value), indent=2, allow_nan=False) + "\n"
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # nobody would: its name is this process's
        raise
