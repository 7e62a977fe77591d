"""Finds the least loaded of many servers in O(log n).

Invariant: every server whose rest is over has an entry in the heap of loads that tells its load or
less, and every one that rests has one in the heap of rests. An entry that tells less than the load
is corrected when it comes to the top, so nobody has to tell of a request that begins; others that
no longer hold are skipped there. The heap is made anew once most entries are such.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

SPARE = 64


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
    """Sorts servers by their load. Tell it of every request that ends, and of rests."""

    def __init__(self, members: Sequence[Loaded]) -> None:
        self._members = members
        self._places = {id(member): place for place, member in enumerate(members)}
        self._rests: list[tuple[float, int]] = []
        self._make()
        for member in members:
            self.rests(member)

    def __len__(self) -> int:
        return len(self._members)

    def ended(self, member: Loaded) -> None:
        """Note that a server's load has fallen."""
        place = self._places.get(id(member))
        if place is None:
            return
        heappush(self._heap, (member.in_flight, place))
        if len(self._heap) > 4 * len(self._members) + SPARE:
            self._make()

    def rests(self, member: Loaded) -> None:
        """Note that a server rests."""
        place = self._places.get(id(member))
        if place is not None and member.rests_until_s > 0:
            heappush(self._rests, (member.rests_until_s, place))

    def least(self, now_s: float) -> int:
        """Return the place of the least loaded that does not rest, the first of several.

        Where all rest, of the one whose rest ends first. There must be one at all.
        """
        members, rests, heap = self._members, self._rests, self._heap
        while rests:
            until_s, place = rests[0]
            if until_s == members[place].rests_until_s:
                if until_s > now_s:
                    break
                heappush(heap, (members[place].in_flight, place))
            heappop(rests)
        while heap:
            told, place = heap[0]
            member = members[place]
            load = member.in_flight
            if told > load or member.rests_until_s > now_s:
                heappop(heap)
            elif told < load:
                heapreplace(heap, (load, place))
            else:
                return place
        return rests[0][1]

    def _make(self) -> None:
        self._heap = [(member.in_flight, place) for place, member in enumerate(self._members)]
        heapify(self._heap)
