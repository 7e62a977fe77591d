"""Both ends of every bucket agree on it, and no order of waiting can block."""

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge.weights.message_order import (
    ALONE,
    Bucket,
    Limits,
    Onward,
    Route,
    SlicePart,
    SlicePlace,
    incoming,
    outgoing,
)

LEARNERS = 6
Group = tuple[list[Route], tuple[int, ...]]


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
    order = draw(st.lists(st.sampled_from(sorted(ranks)), min_size=1, max_size=6))
    firsts = list(accumulate((ranks[layout] for layout in order), initial=0))
    groups: list[Group] = []
    for layout in sorted(set(order)):
        at = [first for first, other in zip(firsts, order, strict=False) if other == layout]
        groups.append((draw(route_lists(ranks[layout])), tuple(at)))
    return groups, firsts[-1]


@settings(max_examples=100)  # whole plans of 2,000 layouts: test_plan.py
@given(fleet=fleets(), limit=st.integers(1, 30) | st.just(2 * ALONE), relays=st.booleans())
def test_both_ends_agree_and_nothing_blocks(
    fleet: tuple[list[Group], int], limit: int, relays: bool
):
    groups, receivers = fleet
    limits = Limits(LEARNERS, receivers, limit, relays)
    sent = [outgoing(groups, source, limits) for source in range(LEARNERS)]
    got: list[list[Bucket]] = [[] for _ in range(receivers)]
    lists: list[list[Bucket]] = [*sent, *([] for _ in range(receivers))]
    for routes, firsts in groups:
        for index, first in enumerate(firsts):
            for rank in {route.destination for route in routes}:
                steps = incoming(routes, SlicePlace(index, firsts), rank, limits)
                lists[LEARNERS + first + rank] = whole(steps)
                got[first + rank] = [step for step in steps if isinstance(step, Bucket)]
    sent = [[b for b in listed if b.sender == at] for at, listed in enumerate(lists)]
    assert relays or not any(sent[LEARNERS:])
    assert Counter(b for buckets in sent for b in buckets) == Counter(
        b for buckets in got for b in buckets
    )
    # every index of every route is in one bucket
    wanted = Counter(
        (first + route.destination, route.name, index)
        for routes, firsts in groups
        for route in routes
        for first in firsts
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
    assert deliver(lists) == sum(map(len, sent)), "each end waits for its next bucket alone"
    if relays:
        require_sent_once(groups, sent)


def _one_index(parts: tuple[SlicePart, ...]) -> bool:
    return len(parts) == 1 and parts[0].length == 1


def whole(steps: list[Bucket | Onward]) -> list[Bucket]:
    """What a server's rank receives and sends, in order; it sends only what it has received."""
    received: list[Bucket] = []
    found: list[Bucket] = []
    for step in steps:
        if isinstance(step, Onward):
            held = received[step.number]
            found.append(Bucket(LEARNERS + held.receiver, step.receiver, held.parts))
        else:
            received.append(step)
            found.append(step)
    return found


def require_sent_once(groups: list[Group], sent: list[list[Bucket]]) -> None:
    """No rank sends a part to the same rank of two servers of a layout."""
    for routes, firsts in groups:
        ranks = {first + r.destination: r.destination for r in routes for first in firsts}
        for buckets in sent:
            parts = Counter(
                (ranks[bucket.receiver], part)
                for bucket in buckets
                if bucket.receiver in ranks
                for part in bucket.parts
            )
            assert max(parts.values(), default=1) == 1


def deliver(lists: list[list[Bucket]]) -> int:
    """Buckets that arrive when every rank blocks on the first one of its list that has not."""
    done = 0
    left = [list(buckets) for buckets in lists]
    moved = True
    while moved:
        moved = False
        for buckets in left:
            if not buckets:
                continue
            ends = left[buckets[0].sender], left[LEARNERS + buckets[0].receiver]
            if ends[0][:1] == ends[1][:1]:
                for end in ends:
                    end.pop(0)
                done, moved = done + 1, True
    return done


def test_servers_pass_on_what_the_replicas_gave_the_first_ones():
    """Two hold "a", one holds "b": five servers get them over chains of three and of five."""
    routes = [Route("a", 0, 0, 1, 0, (0, 1), 0, 1), Route("b", 0, 0, 1, 0, (1,), 0, 1)]
    limits = Limits(senders=2, receivers=5, max_elements=9, relays=True)
    firsts = tuple(range(5))
    chains = {
        name: [
            next(
                step.sender
                for step in incoming(routes, SlicePlace(index, firsts), 0, limits)
                if isinstance(step, Bucket) and step.parts[0].name == name
            )
            for index in firsts
        ]
        for name in "ab"
    }
    assert chains == {"a": [0, 1, 2 + 0, 2 + 1, 2 + 2], "b": [1, 2 + 0, 2 + 1, 2 + 2, 2 + 3]}
    sent = [outgoing([(routes, firsts)], source, limits) for source in (0, 1)]
    assert [[bucket.receiver for bucket in buckets] for buckets in sent] == [[0], [1, 0]]


@pytest.mark.parametrize("servers", [1, 3, 8])
def test_a_chain_takes_one_bucket_more_for_each_server(servers: int):
    """In rounds, in each of which a rank receives one bucket and sends one."""
    buckets = 12
    routes = [Route("a", 0, 0, buckets, 0, (0,), 0, buckets)]
    limits = Limits(1, servers, 1, relays=True)
    firsts = tuple(range(servers))
    lists = [outgoing([(routes, firsts)], 0, limits)]
    lists += [
        [
            Bucket(1 + at, step.receiver, ()) if isinstance(step, Onward) else step
            for step in incoming(routes, SlicePlace(at, firsts), 0, limits)
        ]
        for at in firsts
    ]
    assert [len(listed) for listed in lists] == [buckets, *[2 * buckets] * (servers - 1), buckets]
    for at, listed in enumerate(lists[1:-1]):
        sends = [step.sender == 1 + at for step in listed]
        assert sends == [False, *[False, True] * (buckets - 1), True], "asked for before it waits"


def test_a_round_begins_with_another_partner_for_every_rank():
    everyone = tuple(range(4))
    routes = [
        Route(f"t{source}{rank}", 0, 0, 1, rank, (source,), 0, 1)
        for source in everyone
        for rank in everyone
    ]
    first = [outgoing([(routes, (0,))], source, Limits(4, 4, 1))[0].receiver for source in everyone]
    assert sorted(first) == list(everyone)


def test_a_large_part_travels_alone_and_the_others_together():
    sizes = [5, ALONE, 7, ALONE - 1, ALONE + 1]
    routes = [Route(f"t{index}", 0, 0, size, 0, (0,), 0, size) for index, size in enumerate(sizes)]
    sent = outgoing([(routes, (0,))], 0, Limits(1, 1, 4 * ALONE))
    assert sorted([part.name for part in bucket.parts] for bucket in sent) == [
        ["t0", "t2", "t3"],
        ["t1"],
        ["t4"],
    ]
