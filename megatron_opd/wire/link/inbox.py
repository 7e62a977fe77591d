"""Keeps what comes until its owner takes it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from megatron_opd.wire.link.events import Event


class LinkInbox:
    """Hands events over in the order in which they came.

    failure: is raised from `next` once nothing is left.
    """

    def __init__(self) -> None:
        self._ready = deque[tuple[Event, Callable[[], None]]]()
        self._wake = asyncio.Event()
        self.failure: BaseException | None = None

    def put(self, event: Event, taken: Callable[[], None]) -> None:
        """Append an event. taken: called once its owner has it."""
        self._ready.append((event, taken))
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """End: `next` raises `error` once nothing is left, and so does whoever waits."""
        self.failure = self.failure or error
        self._wake.set()

    async def next(self) -> Event:
        """Wait for the next event."""
        while not self._ready:
            if self.failure is not None:
                raise self.failure
            self._wake.clear()
            await self._wake.wait()
        event, taken = self._ready.popleft()
        taken()
        return event
