"""Replays who worked when in a recorded run, as pieces of time in which nothing begins or ends.

A component is busy while it has work: a student server while it samples and is not paused, as many
teacher servers as there are requests to teachers, every data-parallel rank of the learner during an
update, and one part during a weight sync. The simulator counts alike (sim/host.py). With fewer
cores than busy components all of them slow down alike, so a second of the clock is less than a
second of work.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_opd.metrics.intervals import BusyTime, Interval
from megatron_opd.sim.recording import Recording, RolloutSpan

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Running:
    """Holds a rollout and when its server began to work on it, after those before it in line."""

    span: RolloutSpan
    began_s: float

    @property
    def seconds(self) -> float:
        """Returns for how long it was worked on."""
        return self.span.stop_s - self.began_s


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Holds a run cut into S pieces of time.

    edge_S1: [S + 1] seconds, rising. busy_S: components that work in each piece, scoring_S: teacher
    servers among them. paused_S: whether the student servers are paused.
    """

    edge_S1: Floats
    busy_S: Ints
    scoring_S: Ints
    paused_S: npt.NDArray[np.bool_]

    def speed_S(self, host_cores: float | None) -> Floats:
        """Return seconds of work in a second of the clock, in each piece."""
        if host_cores is None:
            return np.ones(len(self.busy_S))
        return np.minimum(1.0, host_cores / np.maximum(self.busy_S, 1))

    def pauses(self) -> tuple[Ints, Ints]:
        """Return the pieces that end with the begin of a pause, and those that begin with its end.

        A pause without a piece before it or after it is left out.
        """
        change = np.diff(self.paused_S.astype(np.int8))
        stops, goes_on = np.flatnonzero(change == 1), np.flatnonzero(change == -1) + 1
        goes_on = goes_on[goes_on > stops[0]] if len(stops) else goes_on[:0]
        return stops[: len(goes_on)], goes_on

    def pieces(self, start_s: float, stop_s: float) -> slice:
        """Return the pieces from one edge to another."""
        first, last = np.searchsorted(self.edge_S1, [start_s, stop_s])
        return slice(int(first), int(last))


def begun(rollouts: Sequence[RolloutSpan], max_running: int) -> dict[str, list[Running]]:
    """Return every engine's rollouts with the moments at which it took them out of its queue."""
    found: dict[str, list[Running]] = {}
    ends: dict[str, list[float]] = {}
    for span in sorted(rollouts, key=lambda span: span.start_s):
        taken = ends.setdefault(span.engine, [])
        while taken and taken[0] <= span.start_s:
            heapq.heappop(taken)
        # first come, first served: whoever finds no slot takes the one that is free first
        began_s = span.start_s if len(taken) < max_running else heapq.heappop(taken)
        heapq.heappush(taken, span.stop_s)
        found.setdefault(span.engine, []).append(Running(span, min(began_s, span.stop_s)))
    return found


def occupancy_of(
    recording: Recording, running: Iterable[Sequence[Running]], teachers: int, ranks: int = 1
) -> Occupancy:
    """Cut a run into pieces. running: by engine. teachers: servers of all teachers together.

    ranks: data-parallel ranks of the learner.
    """
    engines = [[(r.began_s, r.span.stop_s) for r in one] for one in running]
    scores = [(s.start_s, s.stop_s) for s in recording.scores]
    updates = [(u.start_s, u.stop_s) for u in recording.updates]
    syncs = [(s.start_s, s.stop_s) for s in recording.syncs]
    pauses = [(s.paused_from_s, s.resumed_s) for s in recording.syncs]
    everything = [*(span for one in engines for span in one), *scores, *updates, *syncs, *pauses]
    edge_S1 = np.unique(np.array(everything, dtype=np.float64))
    paused_S = _count(edge_S1, BusyTime(sorted(pauses)).intervals) > 0
    scoring_S = np.minimum(_count(edge_S1, scores), teachers)
    busy_S = scoring_S + ranks * (_count(edge_S1, updates) > 0) + (_count(edge_S1, syncs) > 0)
    for one in engines:
        busy_S += (_count(edge_S1, one) > 0) & ~paused_S
    return Occupancy(edge_S1, busy_S, scoring_S, paused_S)


def _count(edge_S1: Floats, spans: Sequence[Interval]) -> Ints:
    """Return how many spans cover each piece."""
    change_S1 = np.zeros(len(edge_S1), np.int64)
    if spans:
        starts, stops = np.array(spans).T
        np.add.at(change_S1, np.searchsorted(edge_S1, starts), 1)
        np.add.at(change_S1, np.searchsorted(edge_S1, stops), -1)
    return np.cumsum(change_S1)[:-1]
