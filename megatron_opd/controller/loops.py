"""Holds what every loop of the controller shares."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from megatron_opd.controller.errors import LoopFailed

Starter = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]


def start(
    group: asyncio.TaskGroup, name: str, loop: Coroutine[Any, Any, None]
) -> asyncio.Task[None]:
    """Run `loop` as a task of the group; its failure carries its name."""
    task = group.create_task(named(name, loop), name=name)
    # one that is cancelled before its first step would be reported as never awaited
    task.add_done_callback(lambda _: loop.close())
    return task


async def named(name: str, loop: Awaitable[None]) -> None:
    """Await `loop`; an exception is re-raised under the loop's name."""
    try:
        await loop
    except Exception as error:
        raise LoopFailed(name, error) from error


def being_cancelled() -> bool:
    """Return whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
