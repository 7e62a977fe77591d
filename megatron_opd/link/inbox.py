"""Keeps what comes until its owner takes it, and holds messages back where a study wants delays."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable

from megatron_opd.link.events import Event, Received

Hold = Callable[[int, int], float]
"""Returns for how many seconds a message is held back, from its lane and its number in there."""


class Inbox:
    """Hands events over in the order in which they came, but for messages that are held back.

    failure: is raised from `next` once nothing is left.
    """

    def __init__(self) -> None:
        self._ready = deque[tuple[Event, Callable[[], None]]]()
        self._held: list[tuple[float, int, float, Received, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.failure: BaseException | None = None

    def put(self, event: Event, taken: Callable[[], None]) -> None:
        """Append an event. taken: called once its owner has it."""
        self._ready.append((event, taken))
        self._wake.set()

    def hold(self, seconds: float, event: Received, taken: Callable[[], None]) -> None:
        """Append a message after a time; those of the same time stay in order."""
        now_s = asyncio.get_running_loop().time()
        entry = (now_s + seconds, next(self._numbers), now_s, event, taken)
        heapq.heappush(self._held, entry)
        self._set_timer()

    def drop_held(self, peer: str) -> None:
        """Forget what is held back of a peer whose process is gone."""
        self._held = [entry for entry in self._held if entry[3].peer != peer]
        heapq.heapify(self._held)

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

    def close(self) -> None:
        """Forget what is held back, and stop its timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._held.clear()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._held[0][0], self._release)

    def _release(self) -> None:
        now_s = asyncio.get_running_loop().time()
        while self._held and self._held[0][0] <= now_s:
            _, _, since_s, event, taken = heapq.heappop(self._held)
            late = Received(event.peer, event.lane, event.parts, now_s - since_s)
            self.put(late, taken)
        self._set_timer()
