"""Runs loops until the first one ends, and keeps the first error of background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_until_first_ends(*loops: Coroutine[Any, Any, Any]) -> None:
    """Run all loops until one ends, or this is cancelled; none is left. Raises its error."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        # awaited, or asyncio would print the exceptions they ended with
        await asyncio.gather(*tasks, return_exceptions=True)


class FirstFailure:
    """Keeps the first error of tasks that nobody awaits; `wait` raises it."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._is_there = asyncio.Event()

    def put(self, error: BaseException) -> None:
        """Take an error, unless there was one."""
        self._error = self._error or error
        self._is_there.set()

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Take the error that a task ended with, if it did; to be called once it is done."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.put(error)

    async def wait(self) -> None:
        """Return never; raise the error once there is one."""
        await self._is_there.wait()
        assert self._error is not None, "set before"
        raise self._error
