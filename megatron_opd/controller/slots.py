"""Serves what waits, at most so many at once.

A slot is a task only while it works: one that idled would hold the frames of its coroutine, and a
controller of thousands of servers has tens of thousands of slots. What is done goes on to the next
stage's slots in the same task where one is free there and nothing waits here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from heapq import heappop, heappush

from megatron_opd.controller.errors import LoopFailed

Work = Callable[[int], Awaitable[bool | None]]
"""Works on a prompt, by its uid; returns whether it goes on to the next stage."""


class Slots:
    """Calls `work` with what waits, the smallest uid first. For one event loop.

    most: calls at once. A call that fails fails the task group, as loop NAME-NUMBER.
    """

    def __init__(self, name: str, most: int, work: Work, then: Slots | None = None) -> None:
        self._name, self._work, self._then = name, work, then
        self._waiting: list[int] = []
        self._free = list(range(most - 1, -1, -1))
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    def open(self, group: asyncio.TaskGroup) -> None:
        """Begin to work, as tasks of the group."""
        self._group = group
        for _ in range(min(len(self._waiting), len(self._free))):
            self._start(group)

    def put(self, uid: int) -> None:
        """Let a prompt be worked on."""
        heappush(self._waiting, uid)
        if self._group is not None and self._free:
            self._start(self._group)

    def close(self) -> None:
        """End what is being worked on, and begin nothing else."""
        self._group = None
        self._waiting.clear()
        for task in self._tasks.values():
            task.cancel()

    def _start(self, group: asyncio.TaskGroup) -> None:
        number = self._free.pop()
        serving = self._serve(number)
        try:
            self._tasks[number] = group.create_task(serving)
        except RuntimeError:  # the group is ending, as another loop failed
            serving.close()
            self._group = None

    async def _serve(self, number: int) -> None:
        done = await self._work_on(number)
        del self._tasks[number]
        self._free.append(number)
        if done is not None and self._then is not None:
            await self._then.serve_here(done)

    async def _work_on(self, number: int) -> int | None:
        """Serve until nothing waits; return what goes on and was not put there yet."""
        done = None
        try:
            while self._waiting:
                if done is not None and self._then is not None:
                    self._then.put(done)
                uid = heappop(self._waiting)
                done = uid if await self._work(uid) else None
        except Exception as error:
            raise LoopFailed(f"{self._name}-{number}", error) from error
        return done

    async def serve_here(self, uid: int) -> None:
        """Serve a prompt in the caller's task; without a free slot it waits."""
        if not self._free or self._group is None:
            self.put(uid)
            return
        heappush(self._waiting, uid)
        number = self._free.pop()
        task = asyncio.current_task()
        assert task is not None
        self._tasks[number] = task
        await self._serve(number)
