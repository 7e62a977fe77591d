"""Puts the routes of a plan into buckets, and all buckets into one order. Torch-free.

A bucket holds parts of one kind and one (learner rank, server rank) pair, end to end, and is never
larger than the limit: a part that does not fit is cut along its dimension. A part of ALONE numbers
or more is a bucket of its own: a rank that holds it in one piece then sends or receives it there,
without a copy (exchange.py).

Every rank sends or receives its own buckets in the one order of all, so that no two ranks can wait
for each other: the first bucket of that order which has not arrived is the next one of both its
ends. In that order the buckets of a round, one of each pair, come by the distance of their two
ranks: all ranks start with another partner. Between ranks on one host the same holds (legs.py).

Both ends compute their lists from the same routes, so nobody sends lists to a thousand ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sglang_bridge.weights.formats import PLAIN, Kind

ALONE = 1 << 16
"""Numbers of the smallest part that travels alone: for fewer a message costs more than a copy."""


@dataclass(frozen=True, slots=True)
class Route:
    """Describes [start, start + length) of dimension `dim` of `name` on its way to a server rank.

    sources: the learner ranks that hold it. turn: which of them serves server 0. destination: the
    rank within its server. elements: how many numbers it is. kind: what numbers they are.
    """

    name: str
    dim: int
    start: int
    length: int
    destination: int
    sources: tuple[int, ...]
    turn: int
    elements: int
    kind: Kind = PLAIN

    def source(self, server: int) -> int:
        """Return the learner rank that sends it to `server`, counted from 0."""
        return self.sources[(self.turn + server) % len(self.sources)]


@dataclass(frozen=True, slots=True)
class Part:
    """Describes [start, start + length) of dimension `dim` of tensor `name`, `elements` numbers."""

    name: str
    dim: int
    start: int
    length: int
    elements: int
    kind: Kind = PLAIN


@dataclass(frozen=True, slots=True)
class Bucket:
    """Describes one message. source: a learner rank. receiver: a rank among those of all servers.

    Servers' ranks are counted in the order of the servers.
    """

    source: int
    receiver: int
    parts: tuple[Part, ...]

    @property
    def elements(self) -> int:
        """Returns the numbers that it holds."""
        return sum(part.elements for part in self.parts)

    @property
    def kind(self) -> Kind:
        """Returns the kind of all its parts."""
        return self.parts[0].kind


@dataclass(frozen=True, slots=True)
class Place:
    """Says where a server is. index: among the servers of its layout. first: its first receiver."""

    index: int
    first: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Holds what all ranks agree on. receivers: ranks of all servers. max_elements: of a bucket."""

    receivers: int
    max_elements: int


Streams = dict[tuple[int, int, Kind], list[Part]]
"""Holds the parts on their way, by learner rank, receiver and kind."""


def outgoing(
    groups: Iterable[tuple[Sequence[Route], Sequence[Place]]], source: int, limits: Limits
) -> list[Bucket]:
    """Return what the learner rank `source` sends, in order.

    groups: for every layout of servers the routes to one of them, and where they all are.
    """
    parts: Streams = defaultdict(list)
    for routes, places in groups:
        for route in routes:
            if source in route.sources:
                for place in places:
                    if route.source(place.index) == source:
                        receiver = place.first + route.destination
                        parts[source, receiver, route.kind].append(_part(route))
    return _ordered(parts, limits)


def incoming(routes: Iterable[Route], place: Place, rank: int, limits: Limits) -> list[Bucket]:
    """Return what rank `rank` of the server at `place` receives, in order."""
    parts: Streams = defaultdict(list)
    for route in routes:
        if route.destination == rank:
            source = route.source(place.index)
            parts[source, place.first + rank, route.kind].append(_part(route))
    return _ordered(parts, limits)


def _ordered(streams: Streams, limits: Limits) -> list[Bucket]:
    """Put every stream into buckets, and the buckets into the one order of all ranks."""
    keyed: list[tuple[tuple[int, int, int, str], Bucket]] = []
    for (source, receiver, kind), parts in streams.items():
        distance = (receiver - source) % limits.receivers
        for turn, content in enumerate(_buckets(parts, limits.max_elements)):
            keyed.append(((turn, distance, source, kind), Bucket(source, receiver, content)))
    return [bucket for _, bucket in sorted(keyed, key=lambda pair: pair[0])]


def _buckets(parts: Sequence[Part], max_elements: int) -> Iterator[tuple[Part, ...]]:
    """Yield large parts alone, and the others together, as many consecutive ones as fit."""
    held: list[Part] = []
    room = max_elements
    for part in parts:
        for piece in _cut(part, max_elements):
            if piece.elements >= ALONE:
                yield (piece,)
                continue
            if held and piece.elements > room:
                yield tuple(held)
                held, room = [], max_elements
            held.append(piece)
            room -= piece.elements
    if held:
        yield tuple(held)


def _cut(part: Part, max_elements: int) -> Iterator[Part]:
    """Yield a part in pieces that fit into a bucket; one index at least, whatever its size."""
    if part.elements <= max_elements:
        yield part
        return
    one = part.elements // part.length
    step = max(1, max_elements // one)
    for first in range(0, part.length, step):
        length = min(step, part.length - first)
        yield replace(part, start=part.start + first, length=length, elements=length * one)


def _part(route: Route) -> Part:
    return Part(route.name, route.dim, route.start, route.length, route.elements, route.kind)
