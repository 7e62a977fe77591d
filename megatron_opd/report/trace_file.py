"""Reads the time line of a run (trace.json) into busy intervals, row by row, as it is written.

The other side of metrics/trace.py: spans that overlap are merged, which is all that "when was this
stage busy" needs and keeps memory small; what a single response did is for Perfetto.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from megatron_opd.metrics.intervals import BusyTime
from megatron_opd.metrics.timeline import LEARNER, PIPELINE
from megatron_opd.metrics.trace_events import ROW_NAME, TraceEvent, trace_event
from megatron_opd.report.appended import AppendedLines

PAUSED = "paused"
DROP = "drop: "
MOST_DROPS = 1000
"""Times of drops that are kept, the first ones; all are counted."""
_UPDATE = re.compile(r"update (\d{1,15})")


class TraceFile:
    """Collects what a run's stages did. Times: seconds since the begin of the trace.

    busy: by row, in the order of the file. paused: the same for the rows of servers. updates: when
    each update ended. drops_s: when samples were dropped; drops: how many, by reason. damaged:
    lines that are no event.
    """

    def __init__(self, path: Path) -> None:
        self._lines = AppendedLines(path)
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
        if line.startswith(b'{"ph":"C"'):
            return  # counters are half of a trace, and tell nothing about stages
        try:
            event = trace_event(line)
            if event is None:
                return
            if event.name == ROW_NAME:
                name = str(event.args.get("name"))
                self._rows[event.pid] = name
                self.busy.setdefault(name, BusyTime())
            elif event.ph == "X":
                self._span(event)
            elif event.ph == "i":
                self._mark(event)
        except (ValueError, KeyError):
            self.damaged += 1

    def _span(self, event: TraceEvent) -> None:
        row = self._rows[event.pid]
        if event.name == PAUSED and event.tid == 0:
            self.paused.setdefault(row, BusyTime()).add(event.start_s, event.stop_s)
            return
        self.busy[row].add(event.start_s, event.stop_s)
        update = _UPDATE.fullmatch(event.name) if row == LEARNER else None
        if update is not None:
            self.updates[int(update[1])] = event.stop_s

    def _mark(self, event: TraceEvent) -> None:
        if self._rows[event.pid] == PIPELINE and event.name.startswith(DROP):
            self.drops[event.name.removeprefix(DROP)] += 1
            if len(self.drops_s) < MOST_DROPS:
                self.drops_s.append(event.start_s)
