"""Decides what a weight sync does with the responses that are being sampled.

| in_flight | a response in flight                                 | the weight sync           |
|-----------|------------------------------------------------------|---------------------------|
| in_place  | waits and goes on with the new weights               | begins at once            |
| keep      | is finished with the weights that it began with      | waits for all of them     |
| abort     | is thrown away and sampled anew with the new weights | begins once they are gone |

Only with `keep` has every response one version. `abort` throws long responses away more often; what
is sampled anew meets the same random numbers, so that only what newer weights change can be shorter
(docs/schedules.md).

Of a trajectory it is the turn that is being sampled which is held, finished or thrown away: turns
that were sampled stay, and an environment's answer takes no part in a weight sync. With `keep`
every turn has one version, and a trajectory may have several.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from megatron_opd.config.schedule import InFlight
from megatron_opd.records.types import AnyRollout, with_restarts

Result = TypeVar("Result")


class ServingServers(Protocol):
    """Names the method of a fleet, or of its weight sync, that says when nothing samples."""

    async def until_none_serves(self) -> None:
        """Return once no server is left that could finish a response."""
        ...


class Rollouts:
    """Runs rollouts, or turns, and holds them back while weights are synced. For one event loop.

    servers: that sample. Where none of them serves, what is in flight waits for the weight sync,
    which must not wait for it.
    """

    def __init__(self, policy: InFlight, servers: ServingServers) -> None:
        self._policy, self._servers = policy, servers
        self._open = asyncio.Event()
        self._open.set()
        # in the order in which they began, which is that in which they are thrown away
        self._running: dict[asyncio.Task[Any], None] = {}
        self._aborted: set[asyncio.Task[Any]] = set()

    def run(self, generate: Callable[[], Awaitable[AnyRollout]]) -> Awaitable[AnyRollout]:
        """Return what `generate` samples, in the end; its restarts include those for a sync."""
        return generate() if self._policy == "in_place" else self._run(generate)

    async def _run(self, generate: Callable[[], Awaitable[AnyRollout]]) -> AnyRollout:
        rollout, aborted = await self.counted(generate)
        return with_restarts(rollout, aborted)

    async def counted(self, sample: Callable[[], Awaitable[Result]]) -> tuple[Result, int]:
        """Return what `sample` returns, and how many tries before were thrown away for a sync."""
        aborted = 0
        if self._policy == "in_place":
            return await sample(), aborted
        while True:
            while not self._open.is_set():  # the next weight sync may begin before a waiter wakes
                await self._open.wait()
            task = asyncio.ensure_future(_awaited(sample))
            self._running[task] = None
            try:
                return await task, aborted
            except asyncio.CancelledError:
                if task not in self._aborted:
                    task.cancel()
                    raise
                aborted += 1
            finally:
                del self._running[task]
                self._aborted.discard(task)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold rollouts back, and let those in flight end as the policy says."""
        if self._policy == "in_place":
            yield
            return
        self._open.clear()
        try:
            if self._policy == "abort":
                self._aborted.update(self._running)
                for task in self._running:
                    task.cancel()
            await self._end_of_running()
            yield
        finally:
            self._open.set()

    async def _end_of_running(self) -> None:
        """Wait for what is in flight, unless no server is left to finish it."""
        if not self._running:
            return
        none_serves = asyncio.ensure_future(self._servers.until_none_serves())
        ended = asyncio.ensure_future(asyncio.wait(set(self._running)))
        try:
            await asyncio.wait({none_serves, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            none_serves.cancel()
            ended.cancel()


async def _awaited(call: Callable[[], Awaitable[Result]]) -> Result:
    return await call()
