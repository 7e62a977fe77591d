"""Reads from trace.json how busy each engine and stage was over time, in bins.

The other side of metrics/timeline.py, read while it is written. A bin holds the mean number of
spans that were open in it, so that a lane costs the same whatever its run has done. Times are
seconds since the trace began.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_opd.metrics.timeline import PIPELINE, SYNC
from megatron_opd.metrics.trace_events import ROW_NAME, DamagedEvent, TraceEvent, trace_event
from megatron_opd.report.appended import AppendedLines

STEP_BYTES = 8 * 2**20
PAUSED, WEIGHT_SYNC = "paused", "weight sync"

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Spans:
    """Collects begins and ends of spans, in seconds."""

    begins: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))

    def add(self, begin_s: float, end_s: float) -> None:
        """Add a span."""
        self.begins.append(begin_s)
        self.ends.append(end_s)

    def open_in(self, edges: Floats) -> Floats:
        """Return the mean number of open spans in each bin between two edges, in seconds."""
        begins, ends = np.array(self.begins, np.float64), np.array(self.ends, np.float64)
        open_s = _seconds_before(begins, edges) - _seconds_before(ends, edges)
        return np.diff(open_s) / np.diff(edges)


@dataclass(slots=True)
class BusyLane:
    """Holds the work of one row of the trace, and its pauses."""

    name: str
    work: Spans = field(default_factory=Spans)
    pauses: Spans = field(default_factory=Spans)


class BusyLanes:
    """Reads one trace.json as it grows. Use from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._lines = AppendedLines(path)
        self._clear()

    def _clear(self) -> None:
        self._by_pid: dict[int, BusyLane] = {}
        self.end_s = 0.0
        """When the last known span ended."""

    def read(self) -> bool:
        """Take some of the new events; return whether there are more. May raise OSError."""
        found = self._lines.read(STEP_BYTES)
        if found.started_over:
            self._clear()
        for line in found.lines:
            with suppress(DamagedEvent):
                if event := trace_event(line.content):
                    self._add(event)
        return found.more

    def _add(self, event: TraceEvent) -> None:
        if event.name == ROW_NAME:
            self._by_pid[event.pid] = BusyLane(str(event.args.get("name", "")))
        lane = self._by_pid.get(event.pid)
        if event.ph != "X" or lane is None:
            return
        self.end_s = max(self.end_s, event.stop_s)
        if event.name == PAUSED:
            lane.pauses.add(event.start_s, event.stop_s)
        elif lane.name != SYNC or event.name.startswith(WEIGHT_SYNC):  # its phases lie inside
            lane.work.add(event.start_s, event.stop_s)

    def between(self, from_s: float | None, to_s: float | None, bins: int) -> dict[str, Any]:
        """Return every lane from `from_s` to `to_s` (None: the begin, the end), in bins.

        open: mean number of spans that were open; paused: share of the time, for engines.
        """
        to_s = self.end_s if to_s is None else min(to_s, self.end_s)
        from_s = 0.0 if from_s is None else from_s
        if to_s <= from_s:
            to_s = from_s + 1.0
        edges = np.linspace(from_s, to_s, bins + 1)
        lanes = [
            {
                "name": lane.name,
                "open": _short(lane.work.open_in(edges)),
                "paused": _short(lane.pauses.open_in(edges)) if lane.pauses.begins else None,
            }
            for lane in self._by_pid.values()
            if lane.name != PIPELINE
        ]
        return {"from_s": from_s, "to_s": to_s, "end_s": self.end_s, "lanes": lanes}


def _seconds_before(times: Floats, edges: Floats) -> Floats:
    """Return for each edge the sum of (edge - time) over all times before it."""
    ordered = np.sort(times)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    count = np.searchsorted(ordered, edges)
    return count * edges - sums[count]


def _short(values: Floats) -> list[float]:
    return np.round(np.maximum(values, 0.0), 3).tolist()
