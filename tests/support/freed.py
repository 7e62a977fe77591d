"""What a failed request has sent must be freed at once: the collector may not come for long."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from megatron_opd.sim.clock import run_virtual
from sglang_bridge.errors import ServerUnreachable

URL = "http://127.0.0.1:1"
Request = Callable[[], Coroutine[Any, Any, None]]


class Body:
    """Stands for what a request sends."""


def unreachable() -> ServerUnreachable:
    """A connection that broke."""
    return ServerUnreachable(URL, "/generate", "reset", sent=True)


def left_of(ask: Callable[[Request], Awaitable[None]], *, fails: bool) -> Body | None:
    """The body of a request once its caller has had its error. fails: or it is never answered."""
    sent: list[weakref.ref[Body]] = []

    async def request() -> None:
        body = Body()
        sent.append(weakref.ref(body))
        if not fails:
            await asyncio.Event().wait()
        await asyncio.sleep(1.0)
        raise unreachable()

    async def run() -> Body | None:
        with pytest.raises(ServerUnreachable):
            await ask(request)
        await asyncio.sleep(0)  # whoever wakes us holds the request until we wait again
        return sent[0]()

    gc.collect()
    gc.disable()
    try:
        return run_virtual(run())
    finally:
        gc.enable()
