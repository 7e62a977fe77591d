"""Lets a site's servers take the versions that its mirror has, and says with which they sample.

A site begins with the weights that its servers loaded, version 0, unless its learner offers a
version: then it samples nothing before it has the newest one. Later it samples on, with what it
has, while newer ones come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.sites.messages import Serving, Want
from megatron_opd.sites.mirror import Mirror
from megatron_opd.sites.pulls import Hold, Pulls
from megatron_opd.sites.together import Failure, together
from sglang_bridge.weights.manifest import VERSION


class Session(Protocol):
    """Names the methods of weight_sync.session.WeightSync that a site needs."""

    async def open(self) -> None:
        """Prepare the servers for their first version. WeightSyncFailed."""
        ...

    async def sync(self, version: int) -> WeightSyncReport:
        """Make the chosen version live on every server. WeightSyncFailed."""
        ...

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        """Sync the current version again whenever only servers without it are left."""
        ...


class Chooser(Protocol):
    """Names the method of MirrorPart that says what the next weight sync is to."""

    def choose(self, mirror: Mirror, name: str) -> None:
        """Let the next weight sync be to a version of a mirror."""
        ...


class SiteWeights:
    """Holds a site's way of the weights, of one learner's start after another.

    Args:
        directory: below which the mirror is.
        owner: names the site among all that may use the directory.
        session: of the site's servers.
        part: its transport.
        held: holds rollouts back as schedule.in_flight says, while a version is taken.
        ask: sends a Want.
        serving: sends a Serving.
        say: tells the user.
        hold: see Pulls.
    """

    def __init__(
        self,
        directory: Path,
        owner: str,
        session: Session,
        part: Chooser,
        *,
        held: Callable[[], AbstractAsyncContextManager[None]],
        ask: Callable[[Want], Awaitable[None]],
        serving: Callable[[Serving], Awaitable[None]],
        say: Callable[[str], None],
        hold: Hold | None = None,
    ) -> None:
        self._directory, self._owner = directory, owner
        self._session, self._part, self._held = session, part, held
        self._ask, self._serving, self._say, self._hold = ask, serving, say, hold
        self._mirror: Mirror | None = None
        self._pulls: Pulls | None = None
        self._work: asyncio.Task[None] | None = None
        self._is_open = False
        self._taking = asyncio.Lock()
        self._failure = Failure()
        self._ready, self._told = asyncio.Event(), asyncio.Event()
        self._told.set()
        self.version = 0
        """What the servers sample with."""
        self.num_taken = 0

    async def ready(self) -> None:
        """Return once there are weights to sample with."""
        await self._ready.wait()

    async def told(self) -> None:
        """Return once the learner was told what the servers sample with.

        Samples go behind that: those of a version that a site does not serve would be forged.
        """
        await self._told.wait()

    async def begin(self, run: str) -> None:
        """Pull and take what a learner offers that has started, as `run`. OSError: no mirror.

        Nothing that is not sampled yet begins before it is known with what.
        """
        await self.pause()
        self._ready.clear()
        self._mirror = Mirror(self._directory, self._owner, run)
        self._pulls = Pulls(self._mirror, self._ask, self._say, self._hold)
        self._work = asyncio.create_task(together(self._pulls.run(), self._take()))
        self._work.add_done_callback(self._failure.watch)

    async def pause(self) -> None:
        """Pull nothing: the learner is gone. A version that is being taken is taken first."""
        async with self._taking:
            await self.end()

    async def end(self) -> None:
        """Pull and take nothing any more, at once."""
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def tasks_begin(self) -> None:
        """Sample with what servers loaded, if no version was offered before the first prompt."""
        assert self._pulls is not None, "made at the Welcome"
        if self.version == 0 and not self._pulls.has_offers:
            self._ready.set()

    async def failed(self) -> None:
        """Return never; raise what ends the way of the weights."""
        await self._failure.wait()

    def remove(self) -> None:
        """Remove the mirror: the run has ended."""
        if self._mirror is not None:
            self._mirror.remove()

    @property
    def pulls(self) -> Pulls | None:
        """Returns what pulls the current run's versions."""
        return self._pulls

    async def _take(self) -> None:
        """Let the servers take the newest version that is whole, again and again."""
        mirror, pulls = self._mirror, self._pulls
        assert mirror is not None
        assert pulls is not None
        taken: str | None = None
        while True:
            name = await (pulls.first() if taken is None else pulls.newer(taken))
            pulls.in_use = {name} if taken is None else {name, taken}
            self._told.clear()
            try:
                async with self._taking:
                    await self._take_one(mirror, name)
                taken, pulls.in_use = name, {name}
                self._ready.set()
                await self._serving(Serving(self.version))
            finally:
                self._told.set()

    async def _take_one(self, mirror: Mirror, name: str) -> None:
        """Let the servers take a version. WeightSyncFailed: they cannot."""
        found = VERSION.fullmatch(name)
        assert found is not None, "the mirror has versions alone"
        version = int(found[2])
        if not self._is_open:
            # only now: until then a server that comes back samples with what it loaded
            await self._session.open()
            self._is_open = True
        self._part.choose(mirror, name)
        async with self._held():
            await self._session.sync(version)
        self.version = version
        self.num_taken += 1

    async def serve_on(self) -> None:
        """Keep servers that were started again from waiting for a version for ever."""
        await self._session.serve_on(lambda: self.version, asyncio.Lock())
