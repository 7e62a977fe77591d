"""Both ends of every bucket agree on it, and no order of waiting can block."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.weight_sync.reshard import Route
from megatron_opd.weight_sync.schedule import Bucket, Part, incoming, outgoing

LEARNERS = 6


@st.composite
def route_lists(draw: st.DrawFn, ranks: int) -> list[Route]:
    """Routes of tensors that no rank gets twice, from any replicas."""
    routes: list[Route] = []
    for index in range(draw(st.integers(1, 12))):
        sources = draw(st.lists(st.integers(0, LEARNERS - 1), min_size=1, max_size=4, unique=True))
        length, one = draw(st.integers(1, 9)), draw(st.integers(1, 5))
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


@settings(max_examples=300)
@given(data=st.data())
def test_both_ends_agree_and_nothing_blocks(data: st.DataObject):
    servers, ranks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    limit = data.draw(st.integers(1, 30))
    routes = data.draw(route_lists(ranks))
    sent = [outgoing(routes, servers, ranks, source, limit) for source in range(LEARNERS)]
    got = {
        (server, rank): incoming(routes, servers, ranks, server, rank, limit)
        for server in range(servers)
        for rank in range(ranks)
    }
    assert Counter(b for buckets in sent for b in buckets) == Counter(
        b for buckets in got.values() for b in buckets
    )
    # every index of every route is in one bucket
    wanted = Counter(
        (server, route.destination, route.name, index)
        for route in routes
        for server in range(servers)
        for index in range(route.start, route.start + route.length)
    )
    assert wanted == Counter(
        (bucket.server, bucket.destination, part.name, index)
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


def deliver(sent: list[list[Bucket]], got: dict[tuple[int, int], list[Bucket]]) -> int:
    """Buckets that arrive when every rank blocks on the first one of its list that has not."""
    done = 0
    left = [list(buckets) for buckets in sent]
    due = {key: list(buckets) for key, buckets in got.items()}
    moved = True
    while moved:
        moved = False
        for buckets in left:
            if buckets and due[buckets[0].server, buckets[0].destination][:1] == buckets[:1]:
                bucket = buckets.pop(0)
                due[bucket.server, bucket.destination].pop(0)
                done, moved = done + 1, True
    return done


def test_a_round_begins_with_another_partner_for_every_rank():
    everyone = tuple(range(4))
    routes = [
        Route(f"t{source}{rank}", 0, 0, 1, rank, (source,), 0, 1)
        for source in everyone
        for rank in everyone
    ]
    first = [outgoing(routes, 1, 4, source, 1)[0].destination for source in everyone]
    assert sorted(first) == list(everyone)
