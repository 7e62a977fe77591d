"""Ends a run whose process, engine or learner rank is gone, even while nothing waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from megatron_opd.controller.health import HealthGuard
from megatron_opd.controller.ports import Guard
from megatron_opd.transport.zmq import RemoteLearner

ResultT = TypeVar("ResultT")


class PartGone(RuntimeError):
    """Reports in one line that a part is gone while the controller's loops do not run."""


async def while_alive(guard: Guard, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await `work` that nothing else guards, such as an evaluation or the last checkpoint.

    Raises PartGone as soon as `guard` reports a part as gone, and what `work` raises.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(guard.watch())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise PartGone(str(watching.exception()))
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        # awaited, or asyncio would print the exceptions they ended with
        await asyncio.gather(working, watching, return_exceptions=True)


class RunGuard:
    """Guards processes, engines and the learner's connections; a controller.ports.Guard."""

    def __init__(self, health: HealthGuard, learner: RemoteLearner) -> None:
        self._health, self._learner = health, learner

    async def watch(self) -> None:
        """Run until cancelled; raise what is gone, a process in preference to its connection."""
        health = asyncio.ensure_future(self._health.watch())
        learner = asyncio.ensure_future(self._learner.failed())
        try:
            await asyncio.wait((health, learner), return_when=asyncio.FIRST_COMPLETED)
            if not health.done():
                raise await self._health.diagnose() or learner.result()
            await health
        finally:
            for task in (health, learner):
                task.cancel()
            await asyncio.gather(health, learner, return_exceptions=True)

    async def diagnose(self) -> Exception | None:
        """Return the ended process that explains why another loop failed, if there is one."""
        return await self._health.diagnose()
