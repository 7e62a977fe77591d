"""Lays out the time line of a run: a lane for each server and stage, over all attempts of the run.

Each attempt of a resumed run has a trace with a clock of its own. They are put on the run's clock
(time_s of metrics.jsonl) by the ends of the updates, which both files know.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from megatron_opd.metrics.intervals import BusyTime
from megatron_opd.metrics.timeline import EVALUATION, LEARNER, PIPELINE, SYNC, TEACHER
from megatron_opd.report.series import DoubleArray, Table
from megatron_opd.report.trace_file import TraceFile

Stage = Literal["student", "teacher", "learner", "weight sync", "evaluation"]
STUDENT_ROW = "student "
MOST_LANES = 256
"""Lanes that are drawn; more servers share lanes, a few to each."""
MOST_INTERVALS = 5000
"""Intervals that are drawn one by one; a longer time line is cut into bins."""
BINS = 1000


@dataclass(frozen=True, slots=True)
class ReportLane:
    """Holds when one server or stage was busy, and paused, on the run's clock.

    Intervals are disjoint and rising. servers: how many share the lane; their times are in
    `members`, one pair for each.
    """

    name: str
    stage: Stage
    members: tuple[tuple[BusyTime, BusyTime], ...]

    @property
    def num_intervals(self) -> int:
        """Returns how many intervals there are to draw."""
        return sum(len(times.intervals) for pair in self.members for times in pair)


@dataclass(frozen=True, slots=True)
class ReportTimeline:
    """Holds all lanes from 0 to stop_s on the run's clock.

    drops_s: when samples were dropped; drops: how many, by reason. skipped: time lines of attempts
    that could not be placed.
    """

    stop_s: float
    lanes: tuple[ReportLane, ...]
    drops_s: tuple[float, ...]
    drops: Mapping[str, int]
    skipped: int

    def busy_share(self, stage: Stage) -> float | None:
        """Return the share of the time in which the average lane of a stage worked, unpaused."""
        pairs = [pair for lane in self.lanes if lane.stage == stage for pair in lane.members]
        if not pairs or self.stop_s <= 0:
            return None
        worked_s = sum(busy.seconds_outside(paused) for busy, paused in pairs)
        return min(1.0, worked_s / len(pairs) / self.stop_s)


def timeline_of(traces: Sequence[TraceFile], table: Table) -> ReportTimeline | None:
    """Lay out the traces of a run's attempts, in their order; None: there is nothing to draw."""
    ended_s = dict(zip(table.update_R.tolist(), table.time_s_R.tolist(), strict=True))
    offsets = [
        _offset(trace, ended_s, _made_again(traces[index + 1 :]))
        for index, trace in enumerate(traces)
    ]
    if len(traces) == 1 and offsets[0] is None:
        offsets = [0.0]  # no update is done yet
    placed = [(t, o) for t, o in zip(traces, offsets, strict=True) if o is not None and t.end_s > 0]
    if not placed:
        return None
    # what an attempt did after the point from which the next one continued was thrown away
    stops_s = [*(offset for _, offset in placed[1:]), math.inf]
    rows = list(dict.fromkeys(row for trace, _ in placed for row in trace.busy if row != PIPELINE))
    lanes: list[ReportLane] = []
    for row in rows:
        parts = [(t.busy.get(row), o, s) for (t, o), s in zip(placed, stops_s, strict=True)]
        pauses = [(t.paused.get(row), o, s) for (t, o), s in zip(placed, stops_s, strict=True)]
        lanes.append(ReportLane(_name(row), _stage(row), ((_joined(parts), _joined(pauses)),)))
    drops_s = [
        at_s + offset
        for (trace, offset), stop_s in zip(placed, stops_s, strict=True)
        for at_s in trace.drops_s
        if at_s + offset < stop_s
    ]
    return ReportTimeline(
        stop_s=max(min(t.end_s + o, s) for (t, o), s in zip(placed, stops_s, strict=True)),
        lanes=tuple(_few(lanes)),
        drops_s=tuple(drops_s),
        drops=sum((trace.drops for trace, _ in placed), Counter()),
        skipped=sum(offset is None for offset in offsets),
    )


def shares(members: Iterable[BusyTime], edges_s: DoubleArray) -> DoubleArray:
    """Return the mean share of every bin [edges_s[i], edges_s[i + 1]) that the members cover."""
    total = np.zeros(len(edges_s) - 1)
    count = 0
    for times in members:
        count += 1
        if times.intervals:
            flat = np.array(times.intervals).ravel()
            lengths = flat[1::2] - flat[::2]
            covered = np.stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)], axis=1).ravel()
            total += np.diff(np.interp(edges_s, flat, covered))
    return np.clip(total / max(count, 1) / np.diff(edges_s), 0.0, 1.0)


def _made_again(later: Iterable[TraceFile]) -> float:
    """Return the first update that later attempts made, which replaced an earlier one's."""
    return min((update for trace in later for update in trace.updates), default=math.inf)


def _offset(trace: TraceFile, ended_s: dict[float, float], before: float) -> float | None:
    """Return what to add to a trace's times, from the updates that both files know.

    before: only updates below it count. None: there are none.
    """
    found = [
        ended_s[update] - stop_s
        for update, stop_s in trace.updates.items()
        if update < before and math.isfinite(ended_s.get(update, math.nan))
    ]
    return median(found) if found else None


def _joined(parts: Iterable[tuple[BusyTime | None, float, float]]) -> BusyTime:
    """Put the times of all attempts on one clock: moved by an offset, and cut at an end."""
    joined = BusyTime()
    for times, offset_s, end_s in parts:
        for start_s, stop_s in times.intervals if times is not None else ():
            if start_s + offset_s < end_s:
                joined.add(start_s + offset_s, min(stop_s + offset_s, end_s))
    return joined


def _few(lanes: Sequence[ReportLane]) -> list[ReportLane]:
    """Let student servers share lanes where there are more than MOST_LANES."""
    students = [lane for lane in lanes if lane.stage == "student"]
    others = [lane for lane in lanes if lane.stage != "student"]
    each = math.ceil(len(students) / MOST_LANES)
    if each <= 1:
        return [*students, *others]
    shared: list[ReportLane] = []
    for first in range(0, len(students), each):
        part = students[first : first + each]
        members = tuple(pair for lane in part for pair in lane.members)
        shared.append(ReportLane(f"{part[0].name} and {len(part) - 1} more", "student", members))
    return [*shared, *others]


def _stage(row: str) -> Stage:
    match row:
        case _ if row == TEACHER:
            return "teacher"
        case _ if row == LEARNER:
            return "learner"
        case _ if row == SYNC:
            return "weight sync"
        case _ if row == EVALUATION:
            return "evaluation"
        case _:
            return "student"


def _name(row: str) -> str:
    return row.removeprefix(STUDENT_ROW)
