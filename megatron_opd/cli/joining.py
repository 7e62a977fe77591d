"""Waiting for parts that were started elsewhere, and saying what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sglang_bridge.errors import ServerRefused, ServerUnreachable
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import ServerInfo

SAY_EVERY_S = 30.0
RETRY_S = 1.0
STARTING_UP = 503


async def answers(fleet: Fleet, timeout_s: float) -> tuple[ServerInfo, ...]:
    """What a fleet's servers are, once all of them answer.

    BridgeError: one answers something else, or there is no answer within `timeout_s`.
    """
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    while True:
        try:
            return await fleet.start()
        except (ServerUnreachable, ServerRefused) as error:
            not_yet = isinstance(error, ServerUnreachable) or error.status == STARTING_UP
            if not not_yet or clock() >= deadline_s:
                raise
        await asyncio.sleep(RETRY_S)


async def all_of(
    waits: Mapping[str, Awaitable[Any]], say: Callable[[str], None], every_s: float = SAY_EVERY_S
) -> None:
    """Wait for all; the first failure ends the rest and is raised. Says what is still missing."""
    tasks = {asyncio.ensure_future(wait): name for name, wait in waits.items()}
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=every_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
            if pending and not done:
                say(f"waiting for {', '.join(sorted(tasks[task] for task in pending))}")
    finally:
        for task in tasks:
            task.cancel()
        # heard out, or asyncio would print what they ended with
        await asyncio.gather(*tasks, return_exceptions=True)
