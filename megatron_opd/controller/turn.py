"""Shares the learner between updates and weight syncs, and counts how long updates waited."""

from __future__ import annotations

import asyncio


class Turn:
    """Gives the learner to the weight sync of one update; implements types.LearnerTurn.

    Made when the update is done, on the event loop. Whoever uses the learner, an update or a weight
    sync, holds the lock `learner`.
    """

    def __init__(self, learner: asyncio.Lock) -> None:
        self._learner = learner
        self._clock = asyncio.get_running_loop().time
        self._early = False
        self._ended = asyncio.Event()
        self._earlier_s = 0.0
        self._since_s: float | None = self._clock()

    @property
    def held_s(self) -> float:
        """Returns for how many seconds no update could begin."""
        now_s = self._clock()
        return self._earlier_s + (0.0 if self._since_s is None else now_s - self._since_s)

    async def begin(self, *, early: bool) -> None:
        """Take the learner for the weight sync. early: `release` may return it."""
        self._early = early
        await self._learner.acquire()

    def release(self) -> None:
        """Let the next update begin, if it may do so before the end."""
        if self._early:
            self.end()

    async def take_back(self) -> None:
        """Wait for a running update and keep the learner until the end."""
        if self._since_s is None:
            await self._learner.acquire()
            self._since_s = self._clock()
            self._early = False

    def end(self) -> None:
        """Let the next update begin."""
        if self._since_s is not None:
            self._earlier_s, self._since_s = self.held_s, None
            self._learner.release()
            self._ended.set()

    async def ended(self) -> None:
        """Wait until the next update may begin."""
        await self._ended.wait()
