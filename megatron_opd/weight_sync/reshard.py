"""Plans which learner rank sends which part of which tensor to which server rank. Torch-free.

Servers of the same layout get the same parts, so the plan is one list of routes for a layout. Which
of the learner's replicas serves server s is the route's turn plus s, modulo their number: replicas
take turns over routes of the same size and over servers. A rank therefore sends at most one route
of every size more than another rank that holds the same parts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from megatron_opd.models.tensors import Shape
from megatron_opd.weight_sync.holdings import Held
from sglang_bridge.weights.formats import Kind
from sglang_bridge.weights.message_order import Route


class CannotReshard(ValueError):
    """Reports in one line what of a tensor the learner does not hold as the servers want it."""


def plan_routes(learner: Iterable[Held], server: Iterable[Held]) -> list[Route]:
    """Plan how one server, or each of several of one layout, gets all its parts from the learner.

    In the order of `learner`'s tensors; the same for the same arguments. A part that crosses the
    border of two learner parts becomes two routes. CannotReshard: a tensor that the learner does
    not hold, or parts of it that do not fit together.
    """
    held: dict[str, list[Held]] = defaultdict(list)
    for part in learner:
        held[part.name].append(part)
    wanted: dict[str, list[Held]] = defaultdict(list)
    for part in server:
        wanted[part.name].append(part)
    unknown = wanted.keys() - held.keys()
    if unknown:
        raise CannotReshard(f"the servers hold a tensor that the learner lacks: {min(unknown)}")
    turns: Counter[tuple[tuple[int, ...], int]] = Counter()
    routes: list[Route] = []
    for name, sources in held.items():
        for part in wanted.get(name, ()):
            for dim, start, length, source in _overlaps(sources, part):
                elements = length * _elements_of_one(part.shape, dim)
                for rank in part.ranks:
                    turn = turns[source.ranks, elements]
                    turns[source.ranks, elements] += 1
                    routes.append(
                        Route(
                            name, dim, start, length, rank, source.ranks, turn, elements, part.kind
                        )
                    )
    return routes


def bytes_sent(
    routes: Sequence[Route], servers: int, item_bytes: Mapping[Kind, int], *, relays: bool = False
) -> Counter[int]:
    """Count the bytes that each learner rank sends to `servers` servers of one layout.

    item_bytes: of a number of each kind. relays: whether servers pass on what they receive.
    """
    sent: Counter[int] = Counter()
    for route in routes:
        replicas = len(route.sources)
        for step in range(min(servers, replicas)):
            times = 1 if relays else (servers - step - 1) // replicas + 1
            sent[route.source(step)] += times * route.elements * item_bytes[route.kind]
    return sent


def bytes_passed_on(
    routes: Sequence[Route], servers: int, item_bytes: Mapping[Kind, int]
) -> Counter[int]:
    """Count the bytes that each rank of the first of `servers` servers of a layout passes on.

    No other one passes on more. item_bytes: of a number of each kind.
    """
    return bytes_received([route for route in routes if len(route.sources) < servers], item_bytes)


def bytes_received(routes: Sequence[Route], item_bytes: Mapping[Kind, int]) -> Counter[int]:
    """Count the bytes that each rank of a server receives."""
    received: Counter[int] = Counter()
    for route in routes:
        received[route.destination] += route.elements * item_bytes[route.kind]
    return received


def num_pairs(routes: Sequence[Route], servers: int, *, relays: bool = False) -> int:
    """Count the pairs of ranks, sender and receiver, in a weight sync to servers of one layout."""
    pairs: set[tuple[str, int, int, int]] = set()
    # of thousands of routes most have the same ends
    alike = {(r.sources, r.turn % len(r.sources), r.destination): r for r in routes}
    for route in alike.values():
        replicas = len(route.sources) if relays else servers
        for server in range(servers):
            first = server < replicas
            sender = route.source(server) if first else server - replicas
            pairs.add(("learner" if first else "server", sender, server, route.destination))
    return len(pairs)


def _overlaps(sources: Sequence[Held], part: Held) -> Iterable[tuple[int, int, int, Held]]:
    """Yield (dim, start, length, source) of what of `part` each source holds; they cover it."""
    split = next((source.dim for source in sources if not source.is_whole), part.dim)
    dim = split if part.is_whole else part.dim
    if not part.is_whole and dim != split:
        raise CannotReshard(
            f"{part.name}: the learner splits dimension {split}, the servers dimension {dim}"
        )
    # a whole part is wanted along whatever dimension the learner splits
    start, length = (0, part.shape[dim]) if part.is_whole else (part.start, part.length)
    covered = start
    for source in sorted(sources, key=lambda held: 0 if held.is_whole else held.start):
        first, size = (0, part.shape[dim]) if source.is_whole else (source.start, source.length)
        begin, end = max(start, first), min(start + length, first + size)
        if begin < end:
            if begin != covered:
                break
            yield dim, begin, end - begin, source
            covered = end
    if covered != start + length:
        raise CannotReshard(
            f"{part.name}: the learner holds [{start}:{covered}] of dimension {dim} of the "
            f"[{start}:{start + length}] that the servers hold"
        )


def _elements_of_one(shape: Shape, dim: int) -> int:
    """Return the numbers of one index of dimension `dim`."""
    return math.prod(shape) // shape[dim]
