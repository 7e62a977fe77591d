"""Syncs learner weights to the student's servers without discarding any request in flight.

A weight sync is tried a few times (steps.py: what one try does). After a failed try every server is
asked to abandon it: one that does not answer is lost, and so is one at fault a second time. A
try that lost a server does not count: how often servers may be lost is bounded elsewhere. The
others are connected anew and get the weights, of which they may hold a mixture: until a try
succeeds none of them samples. Where too few servers or no time is left the weight sync fails, and
they stay paused.

With weight_sync.overlap the learner is released as soon as it sends in the background, unless
digests are due, which it would have to answer. Another try first waits for the update that it is
making, outside of all limits.

With schedule.time_shared the servers make room for each update (memory.py), with the same tries.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.records.types import ALONE, LearnerTurn
from megatron_opd.weight_sync.live import LiveVersion
from megatron_opd.weight_sync.memory import MemoryTurns
from megatron_opd.weight_sync.steps import DigestingLearner, Steps, SyncedFleet
from megatron_opd.weight_sync.transport import FleetPart, OverlappingPart
from sglang_bridge.errors import WeightSyncFailed

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.1
FAULTS = 2
"""A server that answers is given up once this many tries failed by its fault."""


Result = TypeVar("Result")


class OfAnotherRun(WeightSyncFailed):
    """Reports a server that cannot take part, however often it is tried."""


Lose = Callable[[str, str], bool]
"""Takes the server at a url out of the fleet, for a reason; returns False if the run needs it."""


def needed(url: str, why: str) -> bool:
    """Return False: the run needs every server."""
    return False


class WeightSync:
    """Performs all weight syncs of one run; implements controller.ports.WeightSyncer.

    Args:
        fleet: the student servers.
        learner: where the weights are; None: no digest of a server's is compared with anything, as
            what was sent is verified otherwise.
        transport: moves the weights between them.
        config: limits, verification.
        lose: gives up servers.
        memory: hands it from one side to the other; None: learner and servers have their own.

    live: the version that the servers hold.
    """

    def __init__(
        self,
        fleet: SyncedFleet,
        learner: DigestingLearner | None,
        transport: FleetPart,
        config: WeightSyncConfig,
        lose: Lose = needed,
        memory: MemoryTurns | None = None,
    ) -> None:
        self._fleet, self._transport, self._config = fleet, transport, config
        self._overlapping: OverlappingPart | None = None
        if config.overlap:
            assert isinstance(transport, OverlappingPart), "only shards overlaps"
            self._overlapping = transport
        self._lose = lose
        settings = f"weight_sync.timeout_s = {config.timeout_s:g}, weight_sync.tries = "
        self._steps = Steps(fleet, learner, transport, f"{settings}{config.tries}", memory)
        self._memory, self._has_digests = memory, learner is not None
        self._release_s: float | None = None
        self._connected: int | None = None
        self._opened = False
        self._num_syncs = 0
        self._failed: str | None = None
        self._syncing = asyncio.Lock()
        self.live = LiveVersion()

    async def open(self, *, used: bool = False) -> None:
        """Connect the learner and the servers.

        used: an earlier controller of this run may have left the servers in any state, with any
        weights and with requests that nobody waits for; they sample nothing until the first weight
        sync. Raises WeightSyncFailed when a server otherwise holds weights of another run, or does
        not connect in time.
        """
        async with self._syncing:
            if used:
                self.live.changes()
                self._steps.start(self._config.try_s)
                await self._steps.take("abort", self._fleet.abort_all())
                await self._prepare_retry(WeightSyncFailed("the servers were in use"), Counter())
            await self._tried("opening", partial(self._connect, used), ALONE)
            self._opened = True

    async def sync(self, version: int, turn: LearnerTurn = ALONE) -> WeightSyncReport:
        """Make `version` live on every server that is left.

        turn: with the learner, which is released early at most once. Raises WeightSyncFailed; the
        servers stay paused then, and every later call fails too.
        """
        async with self._syncing:
            return await self._sync(version, turn)

    async def make_room(self) -> None:
        """Return once the learner has the memory that it trains with. Raises WeightSyncFailed.

        The servers must have nothing to do; they answer nothing until the next weight sync.
        """
        if self._memory is None:
            return
        async with self._syncing:
            started_s = asyncio.get_running_loop().time()
            await self._tried("release of memory", self._make_room, ALONE)
            self._release_s = asyncio.get_running_loop().time() - started_s

    async def restore_memory(self, urls: Sequence[str]) -> None:
        """Leave these servers with all their memory, whatever was going on when the run ended."""
        if self._memory is not None and urls:
            await self._memory.restore(urls, self._config.cleanup_s)

    def reaches(self, url: str) -> bool:
        """Return whether the server at `url` is one of these."""
        return url in self._fleet.urls

    async def until_none_serves(self) -> None:
        """Return once no server is left that holds the live version."""
        await self._fleet.until_none_serves()

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        """Sync the current version again whenever only servers without it are left.

        Otherwise servers that were added get their weights with the next version. Runs until it is
        cancelled; raises as `sync`. current: the version whose weights the learner has; None: they
        are about to be synced anyway. learner: held by whoever uses it.
        """
        while True:
            await self._fleet.until_none_serves()
            # one under way brings the weights, and may take the learner back: not waited for here
            async with learner:
                if not self._syncing.locked():
                    await self._serve(current)
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _serve(self, current: Callable[[], int | None]) -> None:
        async with self._syncing:
            version = current()
            if self._fleet.none_serves and version is not None:
                await self._sync(version, ALONE)

    async def start_over(self) -> None:
        """Prepare for another learner, after one that may have been lost in a weight sync.

        WeightSyncFailed: too few servers are left.
        """
        async with self._syncing:
            self.live.changes()
            self._failed, self._num_syncs = None, 0
            await self._prepare_retry(WeightSyncFailed("the learner is lost"), Counter())

    async def remove_server(self, url: str, drop: Callable[[], None]) -> str | None:
        """Let a server leave the transport's group between two weight syncs, and `drop` it.

        The others leave too; the next weight sync connects them anew. Returns why the server may
        hold a part of the group still; None: it does not.
        """
        async with self._syncing:
            kept = None
            if self._opened and url in self._fleet.urls:
                self._connected = None
                try:
                    async with asyncio.timeout(self._config.cleanup_s):
                        await self._transport.close()
                except (WeightSyncFailed, TimeoutError) as error:
                    kept = str(error) or f"no answer within {self._config.cleanup_s:g} s"
            drop()
            return kept

    async def close(self) -> None:
        """Release what the servers hold of the transport, for servers that outlive the run."""
        self._steps.start(self._config.timeout_s)
        await self._steps.take("close", self._transport.close())

    async def _sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        if not self._opened:
            raise WeightSyncFailed("weights were sent before the weight sync was opened")
        if self._failed is not None:
            raise WeightSyncFailed(f"an earlier weight sync failed: {self._failed}")
        self.live.changes()
        try:
            once = partial(self._try, version, turn)
            report, tries = await self._tried(f"weight sync {version}", once, turn)
        except WeightSyncFailed as error:
            self._failed = str(error)
            raise
        self._num_syncs += 1
        self.live.settle(version)
        return replace(report, tries=tries, release_s=self._release_s)

    async def _make_room(self, again: bool) -> None:
        assert self._memory is not None
        self._steps.start(self._config.try_s)
        await self._steps.take("release", self._memory.release_servers())
        await self._steps.take("onload", self._memory.onload_learner())

    async def _connect(self, used: bool, again: bool) -> None:
        await self._fleet.let_in()
        self._steps.start(self._config.try_s)
        for url, version in (await self._steps.take("versions", self._fleet.versions())).items():
            if version != 0 and not used:
                said = f"{url} already holds version {version} of another run: restart it"
                raise OfAnotherRun(said)
        self._connected = self._fleet.epoch
        connect = self._transport.reopen if again else self._transport.open
        await self._steps.take("open", connect())
        if (
            again and not used
        ):  # a failed try paused them; all of them have the weights they started with
            await self._steps.take("continue", self._fleet.resume())

    async def _tried(
        self, what: str, once: Callable[[bool], Awaitable[Result]], turn: LearnerTurn
    ) -> tuple[Result, int]:
        """Return the result of the first try that succeeds, and its number.

        once: is told whether there was a try before it.
        """
        tries = left = self._config.tries
        faults: Counter[str] = Counter()
        for number in itertools.count(1):
            before = self._fleet.urls
            try:
                return await once(number > 1), number
            except OfAnotherRun:
                raise
            except WeightSyncFailed as error:
                logger.warning("%s, try %d: %s", what, number, error)
                faults.update(error.servers)
                took_part = {*before, *self._fleet.urls, *error.servers}
                await self._prepare_retry(error, faults)
                lost = took_part.difference(self._fleet.urls)
                for url in lost:  # what comes back there is another process
                    del faults[url]
                left -= tries == 1 or not lost
                if left == 0:
                    said = f"{tries} tries failed, the last one: {error}" if tries > 1 else error
                    raise WeightSyncFailed(str(said), error.servers) from error
                await turn.take_back()
        raise AssertionError("unreachable")

    async def _try(self, version: int, turn: LearnerTurn, again: bool) -> WeightSyncReport:
        """Make `version` live once, also on servers that were added since.

        What comes after a failed try (again) or to other servers than before is verified.
        """
        await self._fleet.let_in()  # where none is left, one is being started again
        self._steps.start(self._config.try_s)
        joined = self._connected != self._fleet.epoch
        if joined:
            self._connected = self._fleet.epoch
            await self._steps.take("reopen", self._transport.reopen())
        every, first = self._config.verify_every, self._num_syncs == 0
        due = first or (every > 0 and self._num_syncs % every == 0)
        unsure = first or again or joined
        verifies, start = self._has_digests and (due or unsure), None
        if self._overlapping is not None:
            # digests need the learner
            released = None if verifies else turn.release
            start = partial(self._overlapping.start, version, released)
        return await self._steps.sync(version, verifies=verifies, live=unsure, start=start)

    async def _prepare_retry(self, error: WeightSyncFailed, faults: Counter[str]) -> None:
        """Prepare for another try. WeightSyncFailed: too few servers are left for one."""
        self._connected = None
        lost = dict(await self._fleet.abandon_weight_update(self._config.cleanup_s))
        for url, count in faults.items():
            if count >= FAULTS:
                lost.setdefault(url, f"{count} tries failed there: {error}")
        for url, why in lost.items():
            # it may have been given up meanwhile by who watches its process
            if url in self._fleet.urls and not self._lose(url, why):
                cause = "" if why in str(error) else f": {why}"
                said = f"{error}; without {url} too few servers are left{cause}"
                raise WeightSyncFailed(said) from error
