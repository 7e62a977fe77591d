"""Provides an event loop whose clock is virtual: hours of waiting pass at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _NoWaitSelector(selectors.DefaultSelector):
    """Moves the virtual clock on instead of sleeping."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, and let the time pass until the next timer."""
        if timeout is None:
            # nothing scheduled and nothing ready: on a real loop this is a hang
            raise RuntimeError("deadlock: every task waits and no timer is set")
        self.loop.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Moves its clock only when everything waits: any schedule runs at once."""

    def __init__(self) -> None:
        selector = _NoWaitSelector()
        super().__init__(selector)
        selector.loop = self
        self.now_s = 0.0

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now_s


def run_virtual(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine as asyncio.run does, on a virtual clock; a deadlock raises RuntimeError."""
    results: list[Result] = []

    async def run() -> None:
        results.append(await coroutine)

    # not as the task's result, of which Runner.run makes a repr that nobody reads
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    return results[0]
