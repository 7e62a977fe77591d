"""The clock of a connection, on a clock of the test's own."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from megatron_opd.sim.clock import run_virtual
from sglang_bridge.arrivals import GRACE_S, Arrival, ArrivalPhase, Arrivals
from sglang_bridge.refusals import Refusals

HEAD_S, LEAST_BYTES_S = 10.0, 1000.0


class Door:
    """A server, the connections that it closed, and when."""

    def __init__(self, most: int = 100) -> None:
        refusals = Refusals(logging.getLogger("test_arrivals"), "here")
        self.server = Arrivals(refusals, HEAD_S, LEAST_BYTES_S, most)
        self.closed: dict[str, float] = {}
        self.paused = False

    def arrival(self, name: str) -> Arrival:
        def close() -> None:
            self.closed[name] = asyncio.get_running_loop().time()

        return Arrival(self.server, close, lambda: self.paused)


def on_its_clock(scenario: Callable[[Door], Awaitable[None]], most: int = 100) -> Door:
    """Call `scenario` with a server; its time begins at 0."""

    async def main() -> Door:
        door = Door(most)
        began_s = asyncio.get_running_loop().time()
        await scenario(door)
        door.closed = {name: at_s - began_s for name, at_s in door.closed.items()}
        return door

    return run_virtual(main())


def test_a_head_has_its_time_and_no_more_however_many_bytes_come():
    async def scenario(door: Door) -> None:
        arrival = door.arrival("slow")
        for _ in range(30):
            arrival.receive(10**6)
            await asyncio.sleep(1.0)

    door = on_its_clock(scenario)
    assert door.closed["slow"] == pytest.approx(HEAD_S + GRACE_S, abs=1e-6)
    assert door.server.refusals.count == 1


@pytest.mark.parametrize(("rate", "kept"), [(0.99, False), (1.01, True)])
def test_a_body_may_not_fall_behind_its_least_rate(rate: float, kept: bool):
    async def scenario(door: Door) -> None:
        arrival = door.arrival("a")
        arrival.enter(ArrivalPhase.BODY)
        for _ in range(5000):
            await asyncio.sleep(1.0)
            arrival.receive(int(rate * LEAST_BYTES_S))

    assert (on_its_clock(scenario).closed == {}) is kept


def test_a_body_that_stops_is_closed_after_what_it_has_earned():
    async def scenario(door: Door) -> None:
        arrival = door.arrival("a")
        arrival.enter(ArrivalPhase.BODY)
        arrival.receive(int(20 * LEAST_BYTES_S))
        await asyncio.sleep(100.0)

    assert on_its_clock(scenario).closed["a"] == pytest.approx(20 + HEAD_S + GRACE_S)


def test_what_came_while_the_event_loop_was_held_up_counts():
    """The timer may be called first, and the bytes be read after."""

    async def scenario(door: Door) -> None:
        arrival = door.arrival("a")
        arrival.enter(ArrivalPhase.BODY)
        await asyncio.sleep(HEAD_S + GRACE_S / 2)
        arrival.receive(int(5 * LEAST_BYTES_S))
        await asyncio.sleep(4.0)
        arrival.enter(ArrivalPhase.ANSWER)
        await asyncio.sleep(100.0)

    assert on_its_clock(scenario).closed == {}


def test_time_in_which_the_server_does_not_read_is_not_counted():
    async def scenario(door: Door) -> None:
        arrival = door.arrival("a")
        arrival.enter(ArrivalPhase.BODY)
        door.paused = True
        await asyncio.sleep(95.0)
        door.paused = False
        await asyncio.sleep(100.0)

    assert 95.0 < on_its_clock(scenario).closed["a"] <= 95.0 + HEAD_S + GRACE_S


def test_who_is_answered_or_known_and_idle_has_no_clock():
    async def scenario(door: Door) -> None:
        answered, known, stranger = (door.arrival(name) for name in ("a", "k", "s"))
        answered.enter(ArrivalPhase.ANSWER)
        known.answered(known=True)
        stranger.answered(known=False)
        assert door.server.strangers == 1
        await asyncio.sleep(1000.0)
        known.receive(1)
        await asyncio.sleep(1000.0)

    door = on_its_clock(scenario)
    assert door.closed["s"] == pytest.approx(HEAD_S + GRACE_S)
    assert door.closed["k"] == pytest.approx(1000 + HEAD_S + GRACE_S)
    assert set(door.closed) == {"s", "k"}


def test_of_too_many_strangers_the_first_goes_and_a_known_one_does_not_count():
    async def scenario(door: Door) -> None:
        known = door.arrival("known")
        known.answered(known=True)
        known.receive(1)
        strangers = [door.arrival(name) for name in ("1", "2", "3")]
        assert set(door.closed) == {"1"}
        strangers[1].stop()
        door.arrival("4")
        assert set(door.closed) == {"1"}
        assert door.server.strangers == 2
        for arrival in (known, *strangers):
            arrival.stop()

    on_its_clock(scenario, most=2)
