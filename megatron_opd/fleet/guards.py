"""Ends a run whose process, engine or learner rank is gone, even while nothing waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine, Mapping
from typing import Any, TypeVar

from megatron_opd.config.roles import Role
from megatron_opd.controller.ports import (
    Guard,
)
from megatron_opd.errors import PartGone
from megatron_opd.fleet.ends import explained
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.launch.health import HealthGuard, WatchedEngine
from megatron_opd.launch.processes import Processes
from megatron_opd.metrics.memory import PeakMemory
from megatron_opd.transport.remote_learner import RemoteLearner
from sglang_bridge.fleet import Fleet

ResultT = TypeVar("ResultT")


async def while_alive(
    guard: Guard,
    work: Coroutine[Any, Any, ResultT],
    beside: Coroutine[Any, Any, None] | None = None,
) -> ResultT:
    """Await `work` that nothing else guards, such as an evaluation or the last checkpoint.

    beside: runs meanwhile, and ends by failing alone.

    Raises PartGone as soon as `guard` reports a part as gone, and what `work` or `beside` raises.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(guard.watch())
    tasks: list[asyncio.Task[Any]] = [working, watching]
    if beside is not None:
        tasks.append(asyncio.create_task(beside))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if watching.done() and not working.done():
            gone = watching.exception()
            raise PartGone(str(gone)) from gone
        if not working.done():
            tasks[-1].result()
        return await working
    finally:
        for task in tasks:
            task.cancel()
        # awaited, or asyncio would print the exceptions they ended with
        await asyncio.gather(*tasks, return_exceptions=True)


class RunGuard:
    """Guards processes, servers and the learner's connections; a controller.ports.Guard.

    health: what watches the processes that there are now; they change when one is started again.
    """

    def __init__(
        self,
        health: Callable[[], HealthGuard],
        learner: RemoteLearner,
        servers: Supervisor | None = None,
    ) -> None:
        self._make_health, self._learner, self._servers = health, learner, servers

    async def watch(self) -> None:
        """Run until cancelled; raise what is gone, a process in preference to its connection."""
        guard = self._make_health()
        health = asyncio.ensure_future(guard.watch())
        others: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._learner.failed())]
        if self._servers is not None:
            others.append(asyncio.ensure_future(self._servers.failed()))
        try:
            done, _ = await asyncio.wait((health, *others), return_when=asyncio.FIRST_COMPLETED)
            if not health.done():
                cause = next(iter(done)).result()
                assert isinstance(cause, Exception)
                raise await explained(cause, guard.processes) or cause
            await health
        finally:
            for task in (health, *others):
                task.cancel()
            await asyncio.gather(health, *others, return_exceptions=True)

    async def diagnose(self, error: Exception) -> Exception | None:
        """Return the ended process that explains why another loop failed, if there is one."""
        return await explained(error, self._make_health().processes)


def watched_engines(
    fleets: Mapping[Role, Fleet], besides: Container[str] = ()
) -> list[WatchedEngine]:
    """Return all servers, as they are watched by asking. besides: urls of those that are not."""
    return [
        WatchedEngine(f"{role} server {client.url}", client.alive)
        for role, fleet in fleets.items()
        for client in fleet.clients
        if client.url not in besides
    ]


def make_guard(
    processes: Processes,
    memory: PeakMemory,
    learner: RemoteLearner,
    servers: Supervisor,
) -> RunGuard:
    """Watch the learner by its process and its socket; the servers are the supervisor's.

    memory: sampled at every look.
    """

    def health() -> HealthGuard:
        return HealthGuard(processes.watched_learner(), on_tick=memory.sample)

    return RunGuard(health, learner, servers)
