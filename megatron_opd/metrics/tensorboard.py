"""Writes TensorBoard event files without torch or TensorFlow."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_opd.metrics.metric import Names
from megatron_opd.metrics.scalars import evaluation_scalars, scalars
from megatron_opd.metrics.sinks import RowFile


class TensorBoardSink:
    """Writes scalars into an event file, one tag per column.

    Written by the caller's own thread: TensorBoard's EventFileWriter prints a traceback from its
    thread when the disk is full.

    Args:
        directory: where the event file is made.
        names: whose metric names the tags have.
    """

    def __init__(self, directory: Path, names: Names = "opd") -> None:
        # the import alone takes 0.3 s; runs without TensorBoard need not pay it
        from tensorboard.compat.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
        )

        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file, self._names = RowFile(directory / name), names
        self._add(Event(wall_time=now, file_version="brain.Event:2"))

    def write(self, update: int, row: Mapping[str, Any]) -> None:
        """Add every finite number of the row at step `update`."""
        self._add_scalars(update, scalars(row, self._names), row)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Add every finite number of an evaluated set at its update."""
        self._add_scalars(row["update"], evaluation_scalars(row), row)

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _add_scalars(self, step: int, found: Mapping[str, float], row: Mapping[str, Any]) -> None:
        # protobuf makes these classes at import
        from tensorboard.compat.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboard.compat.proto.summary_pb2 import (
            Summary,  # pyright: ignore[reportAttributeAccessIssue]
        )

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in found.items()]
        event = Event(step=step, summary=Summary(value=values))
        # wall_time is what TensorBoard's time axis shows; rows carry it when they have it
        event.wall_time = float(row.get("unix_time_s", 0.0))
        self._add(event)

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        framed = io.BytesIO()
        RecordWriter(framed).write(event.SerializeToString())
        self._file.append(framed.getvalue())
