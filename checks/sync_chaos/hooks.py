"""Lets something happen when a weight sync reaches a phase."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

PHASES = {
    "pause": "pause",
    "begin_weight_update": "begin",
    "flush_cache": "flush",
    "end_weight_update": "end",
    "weight_digests": "verify",
    "resume": "continue",
    "stage": "stage",
    "send": "send",
}
"""Phase by the method of fleet or transport that begins it."""
Act = Callable[[], Awaitable[None]]


class Hooked:
    """Stands for a fleet or a transport, and tells when one of PHASES' methods is called.

    before: awaited beside the call. after: awaited once it has succeeded.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._tasks: list[asyncio.Future[None]] = []
        self.beside: dict[str, Act] = {}
        self.after: dict[str, Act] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in PHASES or not inspect.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            phase = PHASES[name]
            if phase in self.beside:
                self._tasks.append(asyncio.ensure_future(self.beside.pop(phase)()))
            result = await found(*args, **kwargs)
            if phase in self.after:
                await self.after.pop(phase)()
            return result

        return call


def at_phase(
    hooked: Sequence[Hooked], phase: str, act: Act, *, after: bool = False
) -> asyncio.Future[float]:
    """Let `act` happen once, beside the next such phase or `after` it; when, by the clock."""
    done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def once() -> None:
        for each in hooked:
            each.beside.pop(phase, None)
            each.after.pop(phase, None)
        await act()
        done.set_result(time.monotonic())

    for each in hooked:
        (each.after if after else each.beside)[phase] = once
    return done
