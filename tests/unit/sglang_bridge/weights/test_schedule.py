"""Both ends of every bucket agree on it, and no order of waiting can block."""

from collections import Counter
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge.weights.schedule import (
    ALONE,
    Bucket,
    Limits,
    Part,
    Place,
    Route,
    incoming,
    outgoing,
)

LEARNERS = 6
Group = tuple[list[Route], list[Place]]


@st.composite
def route_lists(draw: st.DrawFn, ranks: int) -> list[Route]:
    """Routes of tensors that no rank gets twice, from any replicas."""
    routes: list[Route] = []
    for index in range(draw(st.integers(1, 12))):
        sources = draw(st.lists(st.integers(0, LEARNERS - 1), min_size=1, max_size=4, unique=True))
        length, one = draw(st.integers(1, 9)), draw(st.integers(1, 5) | st.just(ALONE // 3))
        for destination in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            routes.append(
                Route(
                    name=f"t{index}",
                    dim=draw(st.integers(0, 1)),
                    start=draw(st.integers(0, 5)),
                    length=length,
                    destination=destination,
                    sources=tuple(sorted(sources)),
                    turn=draw(st.integers(0, 7)),
                    elements=length * one,
                )
            )
    return routes


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Group], int]:
    """Servers of one or two layouts in any order, and the number of their ranks."""
    ranks = {layout: draw(st.integers(1, 4)) for layout in range(draw(st.integers(1, 2)))}
    order = draw(st.lists(st.sampled_from(sorted(ranks)), min_size=1, max_size=4))
    firsts = list(accumulate((ranks[layout] for layout in order), initial=0))
    groups: list[Group] = []
    for layout in sorted(set(order)):
        at = [first for first, other in zip(firsts, order, strict=False) if other == layout]
        places = [Place(index, first) for index, first in enumerate(at)]
        groups.append((draw(route_lists(ranks[layout])), places))
    return groups, firsts[-1]


@settings(max_examples=100)  # whole plans of 2,000 layouts: test_plan.py
@given(fleet=fleets(), limit=st.integers(1, 30) | st.just(2 * ALONE))
def test_both_ends_agree_and_nothing_blocks(fleet: tuple[list[Group], int], limit: int):
    groups, receivers = fleet
    limits = Limits(receivers, limit)
    sent = [outgoing(groups, source, limits) for source in range(LEARNERS)]
    got: list[list[Bucket]] = [[] for _ in range(receivers)]
    for routes, places in groups:
        for place in places:
            for rank in {route.destination for route in routes}:
                got[place.first + rank] = incoming(routes, place, rank, limits)
    assert Counter(b for buckets in sent for b in buckets) == Counter(
        b for buckets in got for b in buckets
    )
    # every index of every route is in one bucket
    wanted = Counter(
        (place.first + route.destination, route.name, index)
        for routes, places in groups
        for route in routes
        for place in places
        for index in range(route.start, route.start + route.length)
    )
    assert wanted == Counter(
        (bucket.receiver, part.name, index)
        for buckets in sent
        for bucket in buckets
        for part in bucket.parts
        for index in range(part.start, part.start + part.length)
    )
    for bucket in (b for buckets in sent for b in buckets):
        assert bucket.elements <= limit or _one_index(bucket.parts)
    assert deliver(sent, got) == sum(map(len, sent)), "each end waits for its next bucket alone"


def _one_index(parts: tuple[Part, ...]) -> bool:
    return len(parts) == 1 and parts[0].length == 1


def deliver(sent: list[list[Bucket]], got: list[list[Bucket]]) -> int:
    """Buckets that arrive when every rank blocks on the first one of its list that has not."""
    done = 0
    left, due = [list(buckets) for buckets in sent], [list(buckets) for buckets in got]
    moved = True
    while moved:
        moved = False
        for buckets in left:
            if buckets and due[buckets[0].receiver][:1] == buckets[:1]:
                due[buckets.pop(0).receiver].pop(0)
                done, moved = done + 1, True
    return done


def test_a_round_begins_with_another_partner_for_every_rank():
    everyone = tuple(range(4))
    routes = [
        Route(f"t{source}{rank}", 0, 0, 1, rank, (source,), 0, 1)
        for source in everyone
        for rank in everyone
    ]
    first = [
        outgoing([(routes, [Place(0, 0)])], source, Limits(4, 1))[0].receiver for source in everyone
    ]
    assert sorted(first) == list(everyone)


def test_a_large_part_travels_alone_and_the_others_together():
    sizes = [5, ALONE, 7, ALONE - 1, ALONE + 1]
    routes = [Route(f"t{index}", 0, 0, size, 0, (0,), 0, size) for index, size in enumerate(sizes)]
    sent = outgoing([(routes, [Place(0, 0)])], 0, Limits(1, 4 * ALONE))
    assert sorted([part.name for part in bucket.parts] for bucket in sent) == [
        ["t0", "t2", "t3"],
        ["t1"],
        ["t4"],
    ]
