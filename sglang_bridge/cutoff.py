"""Ends from outside what a task awaits: an `asyncio.timeout` whose time others decide."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Cutoff:
    """Lets `cut` end the awaits of a `with` block, which then raises TimeoutError.

    As with `asyncio.timeout(None)`, a cancellation by somebody else stays one. That one is for
    blocks with a time of their own and costs ten times as much; of these there are four a sample.
    """

    __slots__ = ("_cancelling", "_task", "happened")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self.happened = False
        """Whether it was cut."""

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None or self._task is not None or self.happened:
            raise RuntimeError("a cutoff is for one block of one task")
        self._task, self._cancelling = task, task.cancelling()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if not self.happened:
            return
        assert task is not None, "entered"
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def cut(self) -> None:
        """End the block now, if the task is in it."""
        if self._task is not None and not self.happened:
            self.happened = True
            self._task.cancel()
