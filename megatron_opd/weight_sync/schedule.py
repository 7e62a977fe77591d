"""Puts the routes of a plan into buckets, and all buckets into one order. Torch-free.

A bucket holds consecutive parts of one (learner rank, server rank) pair, end to end, and is never
larger than the limit: a part that does not fit is cut along its dimension. Every rank sends or
receives its own buckets in the one order of all, so that no two ranks can wait for each other: the
first bucket of that order which has not arrived is the next one of both its ends. In that order
the buckets of a round, one of each pair, come by the distance of their two ranks: all ranks start
with another partner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_opd.weight_sync.reshard import Route


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
    """Describes one message. server, destination: a server and the rank in it that receives."""

    source: int
    server: int
    destination: int
    parts: tuple[Part, ...]

    @property
    def elements(self) -> int:
        """Returns the numbers that it holds."""
        return sum(part.elements for part in self.parts)


def outgoing(
    routes: Iterable[Route], servers: int, ranks: int, source: int, max_elements: int
) -> list[Bucket]:
    """Return what the learner rank `source` sends, in order.

    servers: of one layout. ranks: of each. max_elements: of a bucket.
    """
    parts: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for route in routes:
        if source in route.sources:
            for server in range(servers):
                if route.source(server) == source:
                    parts[server, route.destination].append(_part(route))
    streams = {
        (source, server, destination): found for (server, destination), found in parts.items()
    }
    return _ordered(streams, servers * ranks, ranks, max_elements)


def incoming(
    routes: Iterable[Route],
    servers: int,
    ranks: int,
    server: int,
    destination: int,
    max_elements: int,
) -> list[Bucket]:
    """Return what rank `destination` of `server` receives, in order; the rest as for `outgoing`."""
    parts: dict[tuple[int, int, int], list[Part]] = defaultdict(list)
    for route in routes:
        if route.destination == destination:
            parts[route.source(server), server, destination].append(_part(route))
    return _ordered(parts, servers * ranks, ranks, max_elements)


def _ordered(
    streams: dict[tuple[int, int, int], list[Part]], receivers: int, ranks: int, max_elements: int
) -> list[Bucket]:
    """Put every stream into buckets, and the buckets into the one order of all ranks."""
    keyed: list[tuple[tuple[int, int, int], Bucket]] = []
    for (source, server, destination), parts in streams.items():
        distance = (server * ranks + destination - source) % receivers
        for turn, content in enumerate(_buckets(parts, max_elements)):
            bucket = Bucket(source, server, destination, content)
            keyed.append(((turn, distance, source), bucket))
    return [bucket for _, bucket in sorted(keyed, key=lambda pair: pair[0])]


def _buckets(parts: Sequence[Part], max_elements: int) -> Iterator[tuple[Part, ...]]:
    """Yield consecutive parts together, as many as fit."""
    held: list[Part] = []
    room = max_elements
    for part in parts:
        for piece in _cut(part, max_elements):
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
