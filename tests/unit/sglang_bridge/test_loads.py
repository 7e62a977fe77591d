"""Who is least loaded, against a search through all."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.loads import SPARE, Loads


@dataclass
class Server:
    in_flight: int = 0
    rests_until_s: float = 0.0


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["take", "give back", "rest", "wait", "ask"]),
        st.integers(min_value=0, max_value=5),
    ),
    max_size=400,
)


@given(st.integers(min_value=1, max_value=6), CHANGES)
def test_the_least_loaded_is_found(count: int, changes: list[tuple[str, int]]) -> None:
    servers = [Server() for _ in range(count)]
    loads, now_s = Loads(servers), 0.0
    for what, which in changes:
        server = servers[which % count]
        if what == "wait":
            now_s += which
        elif what == "rest":
            # no two rests end at the same time: who of them is first is not promised
            server.rests_until_s = now_s + 5 + which / 100
            while sum(s.rests_until_s == server.rests_until_s for s in servers) > 1:
                server.rests_until_s += 0.001
            loads.rests(server)
        elif what == "ask":
            expected = min(
                range(count),
                key=lambda i: (max(servers[i].rests_until_s, now_s), servers[i].in_flight),
            )
            assert loads.least(now_s) == expected
        else:
            server.in_flight = max(0, server.in_flight + (1 if what == "take" else -1))
            if what == "give back":
                loads.ended(server)


def test_entries_that_no_longer_hold_do_not_pile_up() -> None:
    servers = [Server(10_000) for _ in range(10)]
    loads = Loads(servers)
    for i in range(10_000):
        servers[i % 10].in_flight -= 1
        loads.ended(servers[i % 10])
    assert len(loads._heap) <= 4 * len(servers) + SPARE


def test_a_stranger_changes_nothing() -> None:
    loads = Loads([Server(in_flight=3)])
    loads.ended(Server())
    loads.rests(Server(rests_until_s=1.0))
    assert loads.least(0.0) == 0
