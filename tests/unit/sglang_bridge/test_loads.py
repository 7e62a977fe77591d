"""Who is least loaded, against a search through all."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.loads import Loads


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
            found = servers[loads.least(now_s)]
            assert best(found, now_s) == min(best(server, now_s) for server in servers)
        else:
            server.in_flight = max(0, server.in_flight + (1 if what == "take" else -1))
            loads.moved(server)


def best(server: Server, now_s: float) -> tuple[float, int]:
    """When it can be asked, and who of those that can now is asked first."""
    until_s = max(server.rests_until_s, now_s)
    return until_s, server.in_flight if until_s == now_s else 0


def test_of_several_the_one_is_first_that_has_waited_longest() -> None:
    servers = [Server() for _ in range(3)]
    loads, asked = Loads(servers), list[int]()
    for _ in range(7):
        asked.append(loads.least(0.0))
        servers[asked[-1]].in_flight += 1
        loads.moved(servers[asked[-1]])
    assert asked == [0, 1, 2, 0, 1, 2, 0]
    for place in (2, 1):
        servers[place].in_flight -= 1
        loads.moved(servers[place])
    assert loads.least(0.0) == 2


def test_a_server_that_rests_again_is_not_asked_when_its_first_rest_is_over() -> None:
    servers = [Server(), Server(in_flight=5)]
    loads = Loads(servers)
    for until_s in (1.0, 3.0):
        servers[0].rests_until_s = until_s
        loads.rests(servers[0])
    assert [loads.least(now_s) for now_s in (0.5, 2.0, 3.0)] == [1, 1, 0]


def test_a_stranger_changes_nothing() -> None:
    loads = Loads([Server(in_flight=3)])
    loads.moved(Server(in_flight=1))
    loads.rests(Server(rests_until_s=1.0))
    assert loads.least(0.0) == 0
