"""Ends requests that make no progress, by what their server says of them.

A request's clock runs while its server runs it without giving it a token, does not know it, or says
nothing at all. It stands still while the request waits in the server's queue and while the server
is paused, and begins anew with every token: a long response that grows is never cut off, so nothing
is selected by length.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_bridge import wire
from sglang_bridge.cutoff import Cutoff
from sglang_bridge.errors import BridgeError, ServerUnreachable
from sglang_bridge.protocol import Progress

LOOKS = 8
"""How often a server is asked within a request's limit; a quick request is never asked about."""
MAX_LOOK_S = 10.0
LONGEST_LOOK = 2.5
"""A look takes at most twice its interval: the wait for it, and for the answer."""
ABORT_S = 5.0

Reply = TypeVar("Reply")


@dataclass(eq=False, slots=True)
class _Held:
    """Holds the clock of one request. tokens: when it was last looked at; None: never.

    end: ends it. idle_s: without progress. silent_s: of which the server answered nothing until
    now.
    """

    rid: str
    end: Cutoff
    seen_s: float
    tokens: int | None = None
    idle_s: float = 0.0
    silent_s: float = 0.0


class Deadlines:
    """Watches the requests in flight at one server.

    Args:
        url: the server's.
        limit_s: how long a request may make no progress.
        ask: asks the server how far it is with its requests.
        abort: ends a request there.
    """

    def __init__(
        self,
        url: str,
        limit_s: float,
        ask: Callable[[], Awaitable[Progress]],
        abort: Callable[[str], Awaitable[None]],
    ) -> None:
        self._url, self._limit_s, self._abort = url, limit_s, abort
        self.ask = ask
        """Who makes the requests elsewhere asks there too."""
        self._look_s = min(limit_s / LOOKS, MAX_LOOK_S)
        self._held: set[_Held] = set()
        self._watch: asyncio.Task[None] | None = None
        self._paused_at_s: float | None = None
        self._paused_s = 0.0

    def stop(self) -> None:
        """Stops the clocks, as the server is paused."""
        if self._paused_at_s is None:
            self._paused_at_s = asyncio.get_running_loop().time()

    def go_on(self) -> None:
        """Lets the clocks go on."""
        if self._paused_at_s is not None:
            self._paused_s += asyncio.get_running_loop().time() - self._paused_at_s
            self._paused_at_s = None

    async def within(self, rid: str, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Returns what `work` returns, the request called `rid`; an infinite limit watches nothing.

        ServerUnreachable that timed out: it made no progress for too long; it is aborted. Only it
        stalled where the server answered meanwhile.
        """
        if self._limit_s == math.inf:
            return await work
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look())
        # no task of its own: thousands of requests are in flight
        held = _Held(rid, Cutoff(), self._now_s())
        try:
            with held.end:
                self._held.add(held)
                return await work
        except TimeoutError:
            if not held.end.happened:
                raise
        finally:
            self._held.discard(held)
        with suppress(BridgeError, TimeoutError):
            async with asyncio.timeout(ABORT_S):
                await self._abort(rid)
        cause = TimeoutError(f"no progress for {self._limit_s:g} s, request_timeout_s")
        stalled = held.silent_s < self._limit_s / 2
        raise ServerUnreachable(
            self._url, wire.WORK_ROUTE, str(cause), sent=True, stalled=stalled
        ) from cause

    async def close(self) -> None:
        """Stops to watch."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None

    def _now_s(self) -> float:
        """Returns the time that passed while the server was not paused."""
        clock_s = asyncio.get_running_loop().time()
        return (clock_s if self._paused_at_s is None else self._paused_at_s) - self._paused_s

    async def _look(self) -> None:
        """Looks at all requests again and again, as long as there are any."""
        while True:
            await asyncio.sleep(self._look_s)
            if not self._held:
                return
            if self._paused_at_s is not None:
                continue
            progress = None
            with suppress(BridgeError, TimeoutError):
                async with asyncio.timeout(self._look_s):
                    progress = await self.ask()
            for held in self._held:
                if self._is_over(held, progress):
                    held.end.cut()

    def _is_over(self, held: _Held, progress: Progress | None) -> bool:
        """Moves a request's clock on; returns whether it made no progress for too long."""
        now_s = self._now_s()
        # nobody looked for longer only where this process was held up, and could not see an answer
        passed_s = min(now_s - held.seen_s, LONGEST_LOOK * self._look_s)
        held.seen_s = now_s
        if progress is None:
            held.silent_s += passed_s
        else:
            held.silent_s = 0.0
            if held.rid in progress.waiting:
                return False
            tokens = progress.tokens.get(held.rid)
            if tokens is not None and tokens != held.tokens:
                held.tokens, held.idle_s = tokens, 0.0
                return False
        held.idle_s += passed_s
        return held.idle_s >= self._limit_s
