"""A request ends when it makes no progress; queues and pauses do not count against it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from megatron_opd.sim.clock import VirtualLoop, run_virtual
from sglang_bridge.deadlines import ABORT_S, Deadlines
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.protocol import Progress
from tests.support.freed import Request, left_of

URL, LIMIT_S = "http://a:1", 80.0
LOOK_S = 10.0


class Server:
    """Says what its requests are like at a time; None: it is silent."""

    def __init__(self, said: Callable[[float], Progress | None]) -> None:
        self.said, self.asked, self.aborted = said, 0, list[str]()
        self.deadlines = Deadlines(URL, LIMIT_S, self.progress, self.abort)

    async def progress(self) -> Progress:
        self.asked += 1
        found = self.said(asyncio.get_running_loop().time())
        if found is None:
            await asyncio.Event().wait()
        assert found is not None
        return found

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)


def running(tokens: int) -> Progress:
    return Progress({"r": tokens, "s": 7}, frozenset())


WAITS = Progress({}, frozenset(["r"]))


def ended(server: Server, after_s: float, beside: Awaitable[None] | None = None) -> float:
    """When the request `r` ended, whose reply comes after so long, or how it did not."""

    async def run() -> float:
        clock = asyncio.get_running_loop().time
        other = None if beside is None else asyncio.ensure_future(beside)
        try:
            await server.deadlines.within("r", asyncio.sleep(after_s))
        finally:
            await server.deadlines.close()
            if other is not None:
                other.cancel()
        return clock()

    return run_virtual(run())


def test_a_quick_request_is_not_asked_about():
    server = Server(lambda now_s: running(0))
    assert ended(server, LOOK_S - 1) == LOOK_S - 1
    assert server.asked == 0


def test_a_long_response_that_grows_is_not_cut_off():
    """Before: whatever took longer than request_timeout_s ended the run."""
    server = Server(lambda now_s: running(int(now_s / 60)))
    assert ended(server, 100 * LIMIT_S) == 100 * LIMIT_S


def test_a_request_waits_in_the_queue_as_long_as_it_takes():
    server = Server(lambda now_s: WAITS)
    assert ended(server, 100 * LIMIT_S) == 100 * LIMIT_S


def test_a_retracted_request_goes_on_where_its_clock_was():
    """It runs for 50 s without a token, waits, and runs: 30 s later it is over."""
    server = Server(lambda now_s: WAITS if 55 < now_s < 555 else running(3))
    with pytest.raises(ServerUnreachable):
        run_virtual(until_over(server, 580, 660))


async def until_over(server: Server, least_s: float, most_s: float) -> None:
    try:
        await server.deadlines.within("r", asyncio.sleep(10_000))
    finally:
        assert least_s <= asyncio.get_running_loop().time() <= most_s
        await server.deadlines.close()


def test_one_that_makes_no_progress_is_aborted_and_timed_out():
    server = Server(lambda now_s: running(3))
    with pytest.raises(ServerUnreachable, match="no progress for 80 s, request_timeout") as caught:
        run_virtual(until_over(server, LIMIT_S, LIMIT_S + 3 * LOOK_S))
    assert caught.value.timed_out
    assert caught.value.stalled, "the server answered all the time"
    assert server.aborted == ["r"]


def test_one_that_the_server_does_not_know_is_no_progress_either():
    server = Server(lambda now_s: Progress({}, frozenset()))
    with pytest.raises(ServerUnreachable):
        run_virtual(until_over(server, LIMIT_S, LIMIT_S + 2 * LOOK_S))


def test_a_silent_server_is_told_from_a_stalled_request():
    server = Server(lambda now_s: None)
    with pytest.raises(ServerUnreachable) as caught:
        run_virtual(until_over(server, LIMIT_S, LIMIT_S + 3 * LOOK_S))
    assert caught.value.timed_out
    assert not caught.value.stalled


def test_an_abort_that_is_not_answered_is_not_waited_for():
    server = Server(lambda now_s: None)

    async def never(rid: str) -> None:
        await asyncio.Event().wait()

    server.deadlines = Deadlines(URL, LIMIT_S, server.progress, never)
    with pytest.raises(ServerUnreachable):
        run_virtual(until_over(server, LIMIT_S, LIMIT_S + 3 * LOOK_S + ABORT_S))


def test_a_pause_stops_the_clock():
    """Silent, as while weights come in: the pause is not counted, the rest is."""
    server = Server(lambda now_s: None)

    async def pauses() -> None:
        await asyncio.sleep(30)
        server.deadlines.stop()
        server.deadlines.stop()
        await asyncio.sleep(1000)
        server.deadlines.go_on()

    async def run() -> None:
        other = asyncio.ensure_future(pauses())
        await until_over(server, 1000 + LIMIT_S, 1000 + LIMIT_S + 3 * LOOK_S)
        await other

    with pytest.raises(ServerUnreachable):
        run_virtual(run())


def test_a_pause_is_over_in_time():
    server = Server(lambda now_s: None)

    async def pauses() -> None:
        server.deadlines.stop()
        await asyncio.sleep(1000)
        server.deadlines.go_on()

    assert ended(server, 1000 + LIMIT_S - 1, pauses()) == 1000 + LIMIT_S - 1


def test_the_watch_ends_with_the_requests():
    async def run() -> None:
        server = Server(lambda now_s: running(1))
        await server.deadlines.within("r", asyncio.sleep(25))
        await asyncio.sleep(LOOK_S)
        asked = server.asked
        await asyncio.sleep(500)
        assert server.asked == asked
        await server.deadlines.within("r", asyncio.sleep(25))
        assert server.asked > asked, "and begins again with the next one"
        await server.deadlines.close()

    run_virtual(run())


def test_a_controller_that_was_held_up_does_not_blame_the_server():
    """Its process was stopped, or computed: no answer could be seen meanwhile."""

    async def run() -> None:
        server = Server(lambda now_s: None)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        def hold_up() -> None:
            loop.now_s += 50 * LIMIT_S

        loop.call_later(15, hold_up)
        await until_over(server, 50 * LIMIT_S + 40, 51 * LIMIT_S + 3 * LOOK_S)

    with pytest.raises(ServerUnreachable):
        run_virtual(run())


@pytest.mark.parametrize("fails", [True, False])
def test_what_a_request_has_sent_is_freed_with_its_error(fails: bool):
    async def ask(request: Request) -> None:
        server = Server(lambda now_s: None)
        try:
            await server.deadlines.within("r", request())
        finally:
            await server.deadlines.close()

    assert left_of(ask, fails=fails) is None
