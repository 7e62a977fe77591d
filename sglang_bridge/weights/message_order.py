"""Puts the routes of a plan into buckets, and all buckets into one order. Torch-free.

A bucket holds parts of one kind on their way from one rank to another, end to end, and is never
larger than the limit: a part that does not fit is cut along its dimension. A part of ALONE numbers
or more is a bucket of its own: a rank that holds it in one piece then sends or receives it there,
without a copy (exchange.py).

Where servers relay, a slice leaves the learner for the first server that each replica serves, and
server s gets it from server s - R of its layout: R counts the replicas, and the rank within the
server is the same. The learner rank that a bucket comes from, its origin, is the same for both, so
it has the same parts on every hop, and no rank sends a part more than once (to one layout).

Every rank sends or receives its own buckets in the one order of all, so that no two ranks can wait
for each other: the first bucket of that order which has not arrived is the next one of both its
ends. That holds for a bucket that is passed on, too, as long as its sender has it by then: it does,
because bucket t of a stream travels its hop h in round t + h, and received it one round before. In
a round lower hops come first: a rank asks for the next bucket before it waits for the last one to
pass it on. Buckets of a hop, one of each pair, come by the distance of their two ranks: all ranks
start with another partner. Between ranks on one host the same holds (legs.py).

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
        """Return the learner rank that it comes from to `server`, counted from 0."""
        return self.sources[(self.turn + server) % len(self.sources)]


@dataclass(frozen=True, slots=True)
class SlicePart:
    """Describes [start, start + length) of dimension `dim` of tensor `name`, `elements` numbers."""

    name: str
    dim: int
    start: int
    length: int
    elements: int
    kind: Kind = PLAIN


@dataclass(frozen=True, slots=True)
class Bucket:
    """Describes one message. sender: a rank of the group. receiver: a rank of a server.

    In the group the learner's ranks come first. Servers' ranks are counted in the order of the
    servers.
    """

    sender: int
    receiver: int
    parts: tuple[SlicePart, ...]

    @property
    def elements(self) -> int:
        """Returns the numbers that it holds."""
        return sum(part.elements for part in self.parts)

    @property
    def kind(self) -> Kind:
        """Returns the kind of all its parts."""
        return self.parts[0].kind


@dataclass(frozen=True, slots=True)
class Onward:
    """Describes a bucket that a server rank passes on. number: its place among those it received.

    receiver: as a bucket's.
    """

    receiver: int
    number: int


@dataclass(frozen=True, slots=True)
class SlicePlace:
    """Says where a server is. index: among the servers of its layout. firsts: of each of these.

    The first one's is its first receiver.
    """

    index: int
    firsts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Holds what all ranks agree on.

    senders: ranks of the learner. receivers: ranks of all servers. max_elements: of a bucket.
    relays: whether servers pass on what they receive. near: where they do not, the learner's rank
    on each receiver's GPU (-1: none), which serves it with all that it holds; empty: none anywhere.
    """

    senders: int
    receivers: int
    max_elements: int
    relays: bool = False
    near: tuple[int, ...] = ()

    def source(self, route: Route, server: int, receiver: int) -> int:
        """Return the learner's rank that a route comes from to a server's rank.

        server: counted from 0 among those of its layout. receiver: among those of all servers.
        """
        near = self.near[receiver] if self.near else -1
        return near if near in route.sources else route.source(server)


Stream = tuple[int, int, Kind]
"""Names parts that travel alike: their origin, its replicas (0: nobody relays), their kind."""
Key = tuple[int, int, int, int, int, int, str]


def outgoing(
    groups: Iterable[tuple[Sequence[Route], Sequence[int]]], source: int, limits: Limits
) -> list[Bucket]:
    """Return what the learner rank `source` sends, in order.

    groups: for every layout of servers the routes to one of them, and the first receiver of each.
    """
    streams: dict[tuple[int, Stream], list[SlicePart]] = defaultdict(list)
    for routes, firsts in groups:
        for route in routes:
            if source in route.sources:
                stream, part = _stream(route, source, limits), _part(route)
                for start in _served(route, source, firsts, limits):
                    streams[start + route.destination, stream].append(part)
    keyed: list[tuple[Key, Bucket]] = []
    for (receiver, stream), parts in streams.items():
        leg = _Leg(0, source, source, receiver, stream)
        for turn, content in enumerate(_buckets(parts, limits.max_elements)):
            keyed.append((leg.key(turn, limits), Bucket(source, receiver, content)))
    return [bucket for _, bucket in sorted(keyed, key=lambda pair: pair[0])]


def _served(route: Route, source: int, firsts: Sequence[int], limits: Limits) -> Sequence[int]:
    """Return the servers, by their first receivers, that `source` sends a route to."""
    if limits.near:
        return [
            start
            for index, start in enumerate(firsts)
            if limits.source(route, index, start + route.destination) == source
        ]
    replicas = len(route.sources)
    first = (route.sources.index(source) - route.turn) % replicas
    return (firsts[:replicas] if limits.relays else firsts)[first::replicas]


def incoming(
    routes: Iterable[Route], place: SlicePlace, rank: int, limits: Limits
) -> list[Bucket | Onward]:
    """Return what rank `rank` of the server at `place` receives and passes on, in order."""
    streams: dict[Stream, list[SlicePart]] = defaultdict(list)
    for route in routes:
        if route.destination == rank:
            source = limits.source(route, place.index, place.firsts[place.index] + rank)
            streams[_stream(route, source, limits)].append(_part(route))
    keyed: list[tuple[Key, tuple[Stream, int], _Leg, tuple[SlicePart, ...] | None]] = []
    for stream, parts in streams.items():
        here, onward = _legs(stream, place, rank, limits)
        for turn, content in enumerate(_buckets(parts, limits.max_elements)):
            name = stream, turn
            keyed.append((here.key(turn, limits), name, here, content))
            if onward is not None:
                keyed.append((onward.key(turn, limits), name, onward, None))
    numbers: dict[tuple[Stream, int], int] = {}
    steps: list[Bucket | Onward] = []
    for _, name, leg, content in sorted(keyed, key=lambda entry: entry[0]):
        if content is None:
            steps.append(Onward(leg.receiver, numbers[name]))
        else:
            numbers[name] = len(numbers)
            steps.append(Bucket(leg.sender, leg.receiver, content))
    return steps


@dataclass(frozen=True, slots=True)
class _Leg:
    """Describes a hop of a stream. sender: its rank in the group; position: on its own side."""

    hop: int
    sender: int
    position: int
    receiver: int
    stream: Stream

    def key(self, turn: int, limits: Limits) -> Key:
        """Return where bucket `turn` of the stream is in the order of all, as it takes this hop."""
        distance = (self.receiver - self.position) % limits.receivers
        return (turn + self.hop, self.hop, distance, self.sender, *self.stream)


def _legs(stream: Stream, place: SlicePlace, rank: int, limits: Limits) -> tuple[_Leg, _Leg | None]:
    """Return on which hop a stream reaches a server's rank, and on which it is passed on."""
    origin, replicas, _ = stream
    index, firsts = place.index, place.firsts
    receiver = firsts[index] + rank
    hop = index // replicas if replicas else 0
    if hop:
        before = firsts[index - replicas] + rank
        here = _Leg(hop, limits.senders + before, before, receiver, stream)
    else:
        here = _Leg(0, origin, origin, receiver, stream)
    if not replicas or index + replicas >= len(firsts):
        return here, None
    after = firsts[index + replicas] + rank
    return here, _Leg(hop + 1, limits.senders + receiver, receiver, after, stream)


def _stream(route: Route, source: int, limits: Limits) -> Stream:
    return source, len(route.sources) if limits.relays else 0, route.kind


def _buckets(parts: Sequence[SlicePart], max_elements: int) -> Iterator[tuple[SlicePart, ...]]:
    """Yield large parts alone, and the others together, as many consecutive ones as fit."""
    held: list[SlicePart] = []
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


def _cut(part: SlicePart, max_elements: int) -> Iterator[SlicePart]:
    """Yield a part in pieces that fit into a bucket; one index at least, whatever its size."""
    if part.elements <= max_elements:
        yield part
        return
    one = part.elements // part.length
    step = max(1, max_elements // one)
    for first in range(0, part.length, step):
        length = min(step, part.length - first)
        yield replace(part, start=part.start + first, length=length, elements=length * one)


def _part(route: Route) -> SlicePart:
    return SlicePart(route.name, route.dim, route.start, route.length, route.elements, route.kind)
