"""Finds the least loaded of many servers in O(1).

Invariant: a server that does not rest is in the row of its load, behind those that came into the
row before it; a server that rests is in no row, and has an entry in the heap of rests. `_least` is
no larger than the load of any row with a server in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol


class Loaded(Protocol):
    """Names what is known of a server: what it works on, and until when it rests, in seconds."""

    @property
    def in_flight(self) -> int:
        """Returns the requests that it works on."""
        ...

    @property
    def rests_until_s(self) -> float:
        """Returns when its rest is over."""
        ...


class Loads:
    """Sorts servers by their load. Tell it of every change of a load, and of rests."""

    def __init__(self, members: Sequence[Loaded]) -> None:
        self._members = members
        self._places = {id(member): place for place, member in enumerate(members)}
        self._rests: list[tuple[float, int]] = []
        self._rows: list[dict[int, None]] = []
        """Places by load; as dicts, for their order."""
        self._row_of: list[int | None] = [None] * len(members)
        self._least = 0
        for place, member in enumerate(members):
            self._put(place, member.in_flight)
            if member.rests_until_s > 0:
                self.rests(member)

    def __len__(self) -> int:
        return len(self._members)

    def moved(self, member: Loaded) -> None:
        """Note that a server's load has changed."""
        place = self._places.get(id(member))
        if place is None:
            return
        row = self._row_of[place]
        if row is not None:
            del self._rows[row][place]
            self._put(place, member.in_flight)

    def rests(self, member: Loaded) -> None:
        """Note that a server rests."""
        place = self._places.get(id(member))
        if place is None:
            return
        row, self._row_of[place] = self._row_of[place], None
        if row is not None:
            del self._rows[row][place]
        heappush(self._rests, (member.rests_until_s, place))

    def least(self, now_s: float) -> int:
        """Return the place of the least loaded that does not rest, of several the first in its row.

        Where all rest, of the one whose rest ends first. There must be one at all.
        """
        rests = self._rests
        while rests and rests[0][0] <= now_s:
            until_s, place = heappop(rests)
            member = self._members[place]
            if until_s == member.rests_until_s and self._row_of[place] is None:
                self._put(place, member.in_flight)
        rows = self._rows
        for load in range(self._least, len(rows)):
            if rows[load]:
                self._least = load
                return next(iter(rows[load]))
        while rests[0][0] != self._members[rests[0][1]].rests_until_s:  # it rests for longer
            heappop(rests)
        return rests[0][1]

    def _put(self, place: int, load: int) -> None:
        while len(self._rows) <= load:
            self._rows.append({})
        self._rows[load][place] = None
        self._row_of[place] = load
        self._least = min(self._least, load)
