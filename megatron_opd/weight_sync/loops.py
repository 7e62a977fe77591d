"""Runs loops beside each other until the first one ends."""

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
