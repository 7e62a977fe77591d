"""Measures a worker's busy time: the merged union of its intervals counts parallel work once.

Intervals are kept merged as they arrive, in finishing order or nearly so; a worker that is always
busy needs one entry, however long the run.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


class BusyTime:
    """Holds disjoint, rising intervals [start, stop] in seconds."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._merged: list[Interval] = []
        for start_s, stop_s in intervals:
            self.add(start_s, stop_s)

    def add(self, start_s: float, stop_s: float) -> None:
        """Count [start_s, stop_s]. Raises ValueError when it ends before it starts."""
        if stop_s < start_s:
            raise ValueError(f"an interval must not end before it starts, got {start_s}..{stop_s}")
        later: list[Interval] = []
        while self._merged and self._merged[-1][1] >= start_s:
            first_s, last_s = self._merged.pop()
            if first_s > stop_s:
                later.append((first_s, last_s))
            else:
                start_s, stop_s = min(start_s, first_s), max(stop_s, last_s)
        self._merged.append((start_s, stop_s))
        self._merged.extend(reversed(later))

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """Returns the union, disjoint and rising."""
        return tuple(self._merged)

    @property
    def seconds(self) -> float:
        """Returns the length of the union in seconds."""
        return sum(stop_s - start_s for start_s, stop_s in self._merged)

    def seconds_outside(self, other: BusyTime) -> float:
        """Return the length of the part of this union that `other` does not cover, in seconds."""
        shared_s, index = 0.0, 0
        for start_s, stop_s in self._merged:
            while index < len(other._merged) and other._merged[index][1] <= start_s:
                index += 1
            for first_s, last_s in other._merged[index:]:
                if first_s >= stop_s:
                    break
                shared_s += min(stop_s, last_s) - max(start_s, first_s)
        return self.seconds - shared_s
