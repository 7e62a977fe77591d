"""Holds the clock of all simulated work, and slows it down where a host has too few cores.

Work takes work seconds. Where every component has hardware of its own, they are the event loop's.
Where components of one host share its cores, all of them slow down alike by cores / busy while more
are busy than there are cores, so that one clock of work, which runs slower then, is enough.
"""

from __future__ import annotations

import asyncio
import math
from heapq import heappop, heappush
from itertools import count
from typing import Protocol


class WorkOwner(Protocol):
    """Holds an alarm. alarm: number of the one that counts; the host sets it."""

    alarm: int

    def ring(self, now_s: float) -> None:
        """Do what is due at `now_s`, in work seconds."""
        ...


class Host:
    """Rings alarms on the clock of work. Use inside one event loop.

    cores: that all components share; None: each has hardware of its own.
    """

    def __init__(self, cores: float | None = None) -> None:
        self._cores = math.inf if cores is None else cores
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, WorkOwner]] = []
        self._numbers = count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._busy = 0.0
        self._rate = 1.0  # work seconds of a second
        self._work_s = self._since_s = self._loop.time()  # work done by a moment of the loop

    @property
    def now_s(self) -> float:
        """Returns the work seconds that have passed."""
        now_s = self._work_s + (self._loop.time() - self._since_s) * self._rate
        return max(self._work_s, now_s)

    @property
    def is_shared(self) -> bool:
        """Returns whether components have to share cores."""
        return self._cores < math.inf

    def set_alarm(self, owner: WorkOwner, when_s: float) -> None:
        """Ring at `when_s`, in place of the alarm that `owner` had; inf: never."""
        owner.alarm = number = next(self._numbers)
        if when_s < math.inf:
            heappush(self._heap, (when_s, number, owner))
            if when_s < self._timer_s:
                self._arm()

    def occupy(self, cores: float) -> None:
        """Count a component that begins to work (cores > 0), or ends (cores < 0)."""
        if not self.is_shared:
            return
        self._busy += cores
        rate = min(1.0, self._cores / self._busy) if self._busy > 0 else 1.0
        if rate != self._rate:
            self._work_s, self._since_s = self.now_s, self._loop.time()
            self._rate = rate
            self._arm()

    async def work(self, seconds: float, cores: float = 1.0) -> None:
        """Take so many work seconds, on so many cores."""
        if seconds <= 0:
            return
        done = self._loop.create_future()
        sleeper = _Sleeper(done)
        self.occupy(cores)
        try:
            self.set_alarm(sleeper, self.now_s + seconds)
            await done
        finally:
            self.occupy(-cores)

    def _arm(self) -> None:
        """Set the loop's timer to the first alarm that counts."""
        heap = self._heap
        while heap and heap[0][2].alarm != heap[0][1]:
            heappop(heap)
        if self._timer is not None:
            self._timer.cancel()
        if not heap:
            self._timer, self._timer_s = None, math.inf
            return
        self._timer_s = heap[0][0]
        when_s = self._since_s + (self._timer_s - self._work_s) / self._rate
        self._timer = self._loop.call_at(when_s, self._ring)

    def _ring(self) -> None:
        """Ring what is due. Time is that of the alarm, whatever the loop's clock rounds it to."""
        now_s = max(self._timer_s, self.now_s)
        self._work_s, self._since_s = now_s, self._loop.time()
        self._timer, self._timer_s = None, -math.inf  # so that no alarm arms it meanwhile
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            when_s, number, owner = heappop(heap)
            if owner.alarm == number:
                owner.ring(when_s)
        self._arm()


class OneByOne:
    """Does one thing after the other, as a process with one thread. seconds: of work on each."""

    def __init__(self, host: Host, seconds: float) -> None:
        self._host, self._seconds = host, seconds
        self._turn = asyncio.Lock()

    async def work(self) -> None:
        """Return once it is done, after all that came before."""
        if self._seconds:
            async with self._turn:
                await self._host.work(self._seconds)


class _Sleeper:
    """Ends a wait."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.alarm = 0
        self._done = done

    def ring(self, now_s: float) -> None:
        if not self._done.done():
            self._done.set_result(None)
