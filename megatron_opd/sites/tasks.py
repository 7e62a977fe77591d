"""Keeps the first error of background tasks."""

from __future__ import annotations

import asyncio
from typing import Any


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
