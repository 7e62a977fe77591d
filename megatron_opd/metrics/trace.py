"""Writes a run's time line as Chrome trace events, which https://ui.perfetto.dev opens.

One process row per stage and engine. Inside a row, spans that overlap in time are put on separate
lanes: a span goes to the lowest lane that was free when it started, so that nothing nests that did
not happen inside something else. Lane 0 is reserved for what concerns the whole row (pauses).
Events are written as they happen; a run that is killed leaves a file that Perfetto still opens (the
array's closing bracket is optional in the format).

Source: "Trace Event Format" (Chromium), events X (complete), i (instant), C (counter), M (names).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MICROSECONDS = 1e6


class TraceWriter:
    """Writes one trace file.

    Args:
        path: the file; replaced when it exists.
        origin_s: the time that is 0 in the trace, on the clock of all other times.
    """

    def __init__(self, path: Path, origin_s: float) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._origin_s = origin_s
        self._rows: dict[str, int] = {}
        self._lane_ends: dict[str, list[float]] = {}
        self._named_lanes: set[tuple[int, int]] = set()
        self._empty = True

    def row(self, name: str) -> int:
        """Return the process id of row `name`; rows are shown in order of first mention."""
        if name not in self._rows:
            pid = len(self._rows) + 1
            self._rows[name] = pid
            self._lane_ends[name] = []
            self._write({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
            order = {"sort_index": pid}
            self._write({"ph": "M", "pid": pid, "name": "process_sort_index", "args": order})
        return self._rows[name]

    def span(
        self,
        row: str,
        name: str,
        start_s: float,
        stop_s: float,
        details: Mapping[str, Any] | None = None,
        lane: int | None = None,
    ) -> None:
        """Draw a span from start_s to stop_s. lane: None picks the lowest free one above 0.

        Spans of a row must be added in the order in which they stopped (that is when they are
        known), which makes the last end of a lane its largest.
        """
        pid = self.row(row)
        if lane is None:
            lane = self._free_lane(row, start_s, stop_s)
        self._name_lane(pid, lane)
        event = {
            "ph": "X",
            "pid": pid,
            "tid": lane,
            "name": name,
            "ts": self._ticks(start_s),
            "dur": round((stop_s - start_s) * _MICROSECONDS),
            "args": dict(details or {}),
        }
        self._write(event)

    def instant(
        self, row: str, name: str, now_s: float, details: Mapping[str, Any] | None = None
    ) -> None:
        """Draw an event of one moment."""
        pid = self.row(row)
        self._name_lane(pid, 0)
        event = {"ph": "i", "s": "p", "pid": pid, "tid": 0, "name": name}
        self._write(event | {"ts": self._ticks(now_s), "args": dict(details or {})})

    def counter(self, row: str, name: str, now_s: float, values: Mapping[str, float]) -> None:
        """Draw a graph: the values from now on."""
        pid = self.row(row)
        event = {"ph": "C", "pid": pid, "name": name, "ts": self._ticks(now_s)}
        self._write(event | {"args": dict(values)})

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """End the array; the file is valid JSON afterwards."""
        if not self._file.closed:
            self._file.write("[\n]\n" if self._empty else "\n]\n")
            self._file.close()

    def _free_lane(self, row: str, start_s: float, stop_s: float) -> int:
        ends = self._lane_ends[row]
        for index, end_s in enumerate(ends):
            if end_s <= start_s:
                ends[index] = stop_s
                return index + 1
        ends.append(stop_s)
        return len(ends)

    def _name_lane(self, pid: int, lane: int) -> None:
        if (pid, lane) not in self._named_lanes:
            self._named_lanes.add((pid, lane))
            args = {"name": f"slot {lane}" if lane else "events"}
            lane_event = {"ph": "M", "pid": pid, "tid": lane, "args": args}
            self._write(lane_event | {"name": "thread_name"})

    def _ticks(self, now_s: float) -> int:
        return round((now_s - self._origin_s) * _MICROSECONDS)

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write("[\n" if self._empty else ",\n")
        self._file.write(json.dumps(event, separators=(",", ":")))
        self._empty = False
