"""Puts the routes of a plan into buckets, and all buckets into one order. Torch-free.

A bucket holds consecutive parts of one (learner rank, server rank) pair, end to end, and is never
larger than the limit: a part that does not fit is cut along its dimension. A part of ALONE numbers
or more is a bucket of its own: a rank that holds it in one piece then sends or receives it there,
without a copy (sglang_bridge/weights/exchange.py).

Every rank sends or receives its own buckets in the one order of all, so that no two ranks can wait
for each other: the first bucket of that order which has not arrived is the next one of both its
ends. In that order the buckets of a round, one of each pair, come by the distance of their two
ranks: all ranks start with another partner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_opd.weight_sync.reshard import Route

ALONE = 1 << 16
"""Numbers of the smallest part that travels alone: for fewer a message costs more than a copy."""


@dataclass(frozen=True, slots=True)
class Part:
    """Describes [start, start + length) of dimension `dim` of tensor `name`, `elements` numbers."""

    name: str
    dim: int
    start: int
    length: int
    elements: int


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


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """Describes servers of one layout. routes: to one of them.

    first_receivers: where each server's ranks start among those of all servers.
    """

    routes: tuple[Route, ...]
    first_receivers: tuple[int, ...]


class Schedule:
    """Says what every rank sends and receives. receivers: ranks of all servers of `groups`."""

    def __init__(
        self, groups: Sequence[ServerGroup], receivers: int, max_elements_of_bucket: int
    ) -> None:
        self._groups, self._receivers = groups, receivers
        self._max_elements = max_elements_of_bucket
        self._routes_to: list[dict[int, list[Route]]] = []
        for group in groups:
            by_rank: dict[int, list[Route]] = defaultdict(list)
            for route in group.routes:
                by_rank[route.destination].append(route)
            self._routes_to.append(by_rank)

    @property
    def is_empty(self) -> bool:
        """Returns whether nothing is sent at all."""
        return not any(group.routes for group in self._groups)

    def outgoing(self, source: int) -> list[Bucket]:
        """Return what the learner rank `source` sends, in order."""
        parts: dict[tuple[int, int], list[Part]] = defaultdict(list)
        for group in self._groups:
            for route in group.routes:
                if source in route.sources:
                    for server, first in enumerate(group.first_receivers):
                        if route.source(server) == source:
                            parts[source, first + route.destination].append(_part(route))
        return self._ordered(parts)

    def incoming(self, receiver: int) -> list[Bucket]:
        """Return what a server rank receives, in order."""
        parts: dict[tuple[int, int], list[Part]] = defaultdict(list)
        for group, routes_to in zip(self._groups, self._routes_to, strict=True):
            for server, first in enumerate(group.first_receivers):
                if first <= receiver:
                    for route in routes_to.get(receiver - first, ()):
                        parts[route.source(server), receiver].append(_part(route))
        return self._ordered(parts)

    def _ordered(self, streams: dict[tuple[int, int], list[Part]]) -> list[Bucket]:
        """Put every stream into buckets, and the buckets into the one order of all ranks."""
        keyed: list[tuple[tuple[int, int, int], Bucket]] = []
        for (source, receiver), parts in streams.items():
            distance = (receiver - source) % self._receivers
            for turn, content in enumerate(_buckets(parts, self._max_elements)):
                keyed.append(((turn, distance, source), Bucket(source, receiver, content)))
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
    one = part.elements // part.length
    step = max(1, max_elements // one)
    for first in range(0, part.length, step):
        length = min(step, part.length - first)
        yield replace(part, start=part.start + first, length=length, elements=length * one)


def _part(route: Route) -> Part:
    return Part(route.name, route.dim, route.start, route.length, route.elements)
