"""Reads the time line of a run (trace.json) into busy intervals, row by row, as it is written.

The other side of metrics/trace.py: spans that overlap are merged, which is all that "when was this
stage busy" needs and keeps memory small; what a single response did is for Perfetto.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from megatron_opd.metrics.intervals import BusyTime
from megatron_opd.metrics.timeline import LEARNER, PIPELINE
from megatron_opd.report.appended import AppendedLines

MICROSECOND = 1e-6
PAUSED = "paused"
DROP = "drop: "
MOST_DROPS = 1000
"""Times of drops that are kept, the first ones; all are counted."""
_UPDATE = re.compile(r"update (\d{1,15})")


class _Event(msgspec.Struct):
    """Holds the parts of a trace event that are read here."""

    ph: str
    pid: int = 0
    tid: int = 0
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] | None = None


class TraceFile:
    """Collects what a run's stages did. Times: seconds since the begin of the trace.

    busy: by row, in the order of the file. paused: the same for the rows of servers. updates: when
    each update ended. drops_s: when samples were dropped; drops: how many, by reason. damaged:
    lines that are no event.
    """

    def __init__(self, path: Path) -> None:
        self._lines = AppendedLines(path)
        self._decode = msgspec.json.Decoder(_Event).decode
        self._forget()

    @property
    def end_s(self) -> float:
        """Returns when the last span ended."""
        ends = [
            times.intervals[-1][1]
            for times in (*self.busy.values(), *self.paused.values())
            if times.intervals
        ]
        return max(ends, default=0.0)

    def read(self) -> None:
        """Take in what was written since the last call. May raise OSError."""
        more = True
        while more:
            found = self._lines.read()
            if found.started_over:
                self._forget()
            for line in found.lines:
                self._add(line.content)
            more = found.more

    def _forget(self) -> None:
        self._rows: dict[int, str] = {}
        self.busy: dict[str, BusyTime] = {}
        self.paused: dict[str, BusyTime] = {}
        self.updates: dict[int, float] = {}
        self.drops_s: list[float] = []
        self.drops: Counter[str] = Counter()
        self.damaged = 0

    def _add(self, line: bytes) -> None:
        text = line.strip(b", \t\r")
        # counters are half of a trace, and tell nothing about stages
        if text in (b"[", b"]", b"") or text.startswith(b'{"ph":"C"'):
            return
        try:
            event = self._decode(text)
            stop_s = (event.ts + event.dur) * MICROSECOND
            if event.ph == "M" and event.name == "process_name":
                name = (event.args or {}).get("name")
                self._rows[event.pid] = str(name)
                self.busy.setdefault(str(name), BusyTime())
            elif event.ph == "X":
                self._span(event, event.ts * MICROSECOND, stop_s)
            elif event.ph == "i":
                self._mark(event, stop_s)
        except (msgspec.MsgspecError, ValueError, KeyError, RecursionError):
            self.damaged += 1

    def _span(self, event: _Event, start_s: float, stop_s: float) -> None:
        row = self._rows[event.pid]
        if event.name == PAUSED and event.tid == 0:
            self.paused.setdefault(row, BusyTime()).add(start_s, stop_s)
            return
        self.busy[row].add(start_s, stop_s)
        update = _UPDATE.fullmatch(event.name) if row == LEARNER else None
        if update is not None:
            self.updates[int(update[1])] = stop_s

    def _mark(self, event: _Event, now_s: float) -> None:
        if self._rows[event.pid] == PIPELINE and event.name.startswith(DROP):
            self.drops[event.name.removeprefix(DROP)] += 1
            if len(self.drops_s) < MOST_DROPS:
                self.drops_s.append(now_s)
