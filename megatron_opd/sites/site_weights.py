"""Pulls versions of the weights and makes them live on a site's servers, one after another.

A site begins with the weights that its servers loaded, version 0, unless its learner offers a
version: then it samples nothing before it has the newest one. Later it samples on, with what it
has, while newer ones come.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self

from megatron_opd.buffer.delays import DelayStream
from megatron_opd.config.schema import Config
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.sites.keys import DIRECTORY
from megatron_opd.sites.messages import Serving, encode
from megatron_opd.sites.mirror import Mirror
from megatron_opd.sites.mirror_part import MirrorPart
from megatron_opd.sites.ports import SiteLink
from megatron_opd.sites.pulls import Pulls
from megatron_opd.sites.tasks import FirstFailure
from megatron_opd.weight_sync.loops import run_until_first_ends
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge.fleet import Fleet
from sglang_bridge.weights.manifest import VERSION


class SiteWeights:
    """Keeps the weights of a site's servers new, for one start of the learner after another.

    Args:
        directory: below which the mirror is.
        owner: names the site among all that may use the directory.
        weight_sync: of the site's servers.
        transport: by which that moves the weights.
        rollouts: held back as schedule.in_flight says, while a version is taken.
        link: to the learner.
        delays: see Pulls.
        say: tells the user.

    version: what the servers sample with. num_taken: versions that they took.
    """

    def __init__(
        self,
        directory: Path,
        owner: str,
        weight_sync: WeightSync,
        transport: MirrorPart,
        rollouts: Rollouts,
        link: SiteLink,
        delays: DelayStream,
        say: Callable[[str], None],
    ) -> None:
        self._directory, self._owner = directory, owner
        self._weight_sync, self._transport, self._rollouts = weight_sync, transport, rollouts
        self._link, self._delays, self._say = link, delays, say
        self._mirror: Mirror | None = None
        self._pulls: Pulls | None = None
        self._work: asyncio.Task[None] | None = None
        self._is_open = False
        self._taking = asyncio.Lock()
        self._failure = FirstFailure()
        self._ready, self._announced = asyncio.Event(), asyncio.Event()
        self._announced.set()
        self.version = self.num_taken = 0

    @classmethod
    def of(
        cls,
        config: Config,
        name: str,
        student: Fleet,
        rollouts: Rollouts,
        link: SiteLink,
        supervisor: Supervisor,
        say: Callable[[str], None],
    ) -> Self:
        """Return those of site `name`. config: the site's own. supervisor: of its servers."""
        settings = config.weight_sync
        assert settings.directory is not None, "the configuration requires it with sites"
        site_dir = config.run.dir / DIRECTORY / name
        transport = MirrorPart(student, settings)
        return cls(
            settings.directory.absolute(),
            f"{socket.gethostname()}:{site_dir.absolute()}",
            WeightSync(student, None, transport, settings, supervisor.lose),
            transport,
            rollouts,
            link,
            DelayStream.of(config, name, "weights"),
            say,
        )

    async def ready(self) -> None:
        """Return once there are weights to sample with."""
        await self._ready.wait()

    async def announced(self) -> None:
        """Return once the learner was sent the version that the servers sample with.

        Samples are sent after that: those of a version that a site does not serve would be forged.
        """
        await self._announced.wait()

    async def begin(self, run: str) -> None:
        """Pull and take what a learner offers that has started, as `run`. OSError: no mirror.

        No prompt is sampled before it is known with which version.
        """
        await self.pause()
        self._ready.clear()
        self._mirror = Mirror(self._directory, self._owner, run)
        self._pulls = Pulls(self._mirror, self._link, self._delays, self._say)
        self._work = asyncio.create_task(run_until_first_ends(self._pulls.run(), self._take()))
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
        """Return never; raise why no version can be taken any more."""
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
            self._announced.clear()
            try:
                async with self._taking:
                    await self._take_one(mirror, name)
                taken, pulls.in_use = name, {name}
                self._ready.set()
                await self._link.send([encode(Serving(self.version))])
            finally:
                self._announced.set()

    async def _take_one(self, mirror: Mirror, name: str) -> None:
        """Let the servers take a version. WeightSyncFailed: they cannot."""
        found = VERSION.fullmatch(name)
        assert found is not None, "the mirror has versions alone"
        version = int(found[2])
        if not self._is_open:
            # only now: until then a server that comes back samples with what it loaded
            await self._weight_sync.open()
            self._is_open = True
        self._transport.choose(mirror, name)
        async with self._rollouts.held():
            await self._weight_sync.sync(version)
        self.version = version
        self.num_taken += 1

    async def serve_on(self) -> None:
        """Keep servers that were started again from waiting for a version for ever."""
        await self._weight_sync.serve_on(lambda: self.version, asyncio.Lock())
