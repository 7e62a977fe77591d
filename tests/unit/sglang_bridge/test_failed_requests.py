"""What a failed request has sent is freed at once: the garbage collector may not come for long."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest

from megatron_opd.sim.clock import run_virtual
from sglang_bridge.client import ServerClient
from sglang_bridge.deadlines import Deadlines
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.members import Member
from sglang_bridge.protocol import Progress

URL = "http://127.0.0.1:1"
Request = Callable[[], Coroutine[Any, Any, None]]


class Body:
    """Stands for what a request sends."""


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left_of(ask: Callable[[Request], Awaitable[None]], *, fails: bool) -> Body | None:
    """The body of a request once its caller has had its error. fails: or it is never answered."""
    sent: list[weakref.ref[Body]] = []

    async def request() -> None:
        body = Body()
        sent.append(weakref.ref(body))
        if not fails:
            await asyncio.Event().wait()
        await asyncio.sleep(1.0)
        raise ServerUnreachable(URL, "/generate", "reset", sent=True)

    async def run() -> Body | None:
        with pytest.raises(ServerUnreachable):
            await ask(request)
        await asyncio.sleep(0)  # whoever wakes us holds the request until we wait again
        return sent[0]()

    return run_virtual(run())


def test_of_one_of_a_fleet():
    async def ask(request: Request) -> None:
        await Member(ServerClient(URL, timeout_s=10.0)).reply(lambda client: request())

    assert left_of(ask, fails=True) is None


@pytest.mark.parametrize("fails", [True, False])
def test_of_one_that_is_watched(fails: bool):
    async def silent() -> Progress:
        raise ServerUnreachable(URL, "/weights_checker", "reset", sent=True)

    async def abort(rid: str) -> None:
        pass

    async def ask(request: Request) -> None:
        deadlines = Deadlines(URL, 10.0, silent, abort)
        try:
            await deadlines.within("r.", request())
        finally:
            await deadlines.close()

    assert left_of(ask, fails=fails) is None
