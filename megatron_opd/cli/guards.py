"""What ends a run while nothing is asked of it: a process, an engine or a learner rank is gone."""

from __future__ import annotations

import asyncio

from megatron_opd.controller.health import HealthGuard
from megatron_opd.transport.zmq import RemoteLearner


class RunGuard:
    """Health of processes and engines, and the learner's connections; a controller.ports.Guard."""

    def __init__(self, health: HealthGuard, learner: RemoteLearner) -> None:
        self._health, self._learner = health, learner

    async def watch(self) -> None:
        """Run until cancelled; raise what is gone: a process rather than its connection."""
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
        """After another loop failed: the process whose end explains it."""
        return await self._health.diagnose()
