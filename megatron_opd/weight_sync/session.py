"""Syncs learner weights to the student's servers without discarding any request in flight.

A weight sync is tried a few times (steps.py: what one try does). After a failed try every server is
asked to settle: one that does not answer is lost, and so is one that is at fault a second time. The
others are connected anew and get the weights, of which they may hold a mixture: until a try
succeeds none of them samples. Where too few servers or no time is left the weight sync fails, and
they stay paused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.weight_sync.steps import DigestingLearner, Steps, SyncedFleet
from megatron_opd.weight_sync.transport import FleetPart
from sglang_bridge.errors import WeightSyncFailed

logger = logging.getLogger(__name__)

FAULTS = 2
"""A server that answers is given up once this many tries failed by its fault."""

Lose = Callable[[str, str], bool]
"""Takes the server at a url out of the fleet, for a reason; returns False if the run needs it."""


def needed(url: str, why: str) -> bool:
    """Return False: the run needs every server."""
    return False


class WeightSync:
    """Performs all weight syncs of one run; implements controller.ports.WeightSyncer.

    Args:
        fleet: the student servers.
        learner: where the weights are.
        transport: moves the weights between them.
        config: limits, verification.
        lose: gives up servers.
    """

    def __init__(
        self,
        fleet: SyncedFleet,
        learner: DigestingLearner,
        transport: FleetPart,
        config: WeightSyncConfig,
        lose: Lose = needed,
    ) -> None:
        self._fleet, self._transport, self._config = fleet, transport, config
        self._lose = lose
        settings = f"weight_sync.timeout_s = {config.timeout_s:g}, weight_sync.tries = "
        self._steps = Steps(fleet, learner, transport, f"{settings}{config.tries}")
        self._connected: int | None = None
        self._opened = False
        self._num_syncs = 0
        self._failed: str | None = None
        self._syncing = asyncio.Lock()

    async def open(self) -> None:
        """Connect the learner and the servers.

        Raises WeightSyncFailed when a server holds weights of another run or does not connect in
        time.
        """
        await self._fleet.let_in()
        self._steps.start(self._config.timeout_s)
        for url, version in (await self._steps.take("versions", self._fleet.versions())).items():
            if version != 0:
                raise WeightSyncFailed(
                    f"{url} already holds version {version} of another run: restart it"
                )
        self._connected = self._fleet.epoch
        await self._steps.take("open", self._transport.open())
        self._opened = True

    async def sync(self, version: int) -> WeightSyncReport:
        """Make `version` live on every server that is left.

        Raises WeightSyncFailed; the servers stay paused then, and every later call fails too.
        """
        async with self._syncing:
            return await self._sync(version)

    async def serve_on(self, version: Callable[[], int], learner_is_free: asyncio.Lock) -> None:
        """Sync the current version again whenever only servers without it are left.

        Otherwise servers that were added get their weights with the next version. Runs until it is
        cancelled; raises as `sync`. learner_is_free: held while the learner's weights may differ
        from those of `version`.
        """
        while True:
            await self._fleet.stranded()
            async with learner_is_free, self._syncing:
                if self._fleet.is_stranded:
                    await self._sync(version())

    async def start_over(self) -> None:
        """Prepare for another learner, after one that may have been lost in a weight sync.

        WeightSyncFailed: too few servers are left.
        """
        async with self._syncing:
            self._failed, self._num_syncs = None, 0
            await self._settle(WeightSyncFailed("the learner is lost"), Counter())

    async def close(self) -> None:
        """Release what the servers hold of the transport, for servers that outlive the run."""
        self._steps.start(self._config.timeout_s)
        await self._steps.take("close", self._transport.close())

    async def _sync(self, version: int) -> WeightSyncReport:
        if not self._opened:
            raise WeightSyncFailed("weights were sent before the weight sync was opened")
        if self._failed is not None:
            raise WeightSyncFailed(f"an earlier weight sync failed: {self._failed}")
        try:
            report = await self._tried(version)
        except WeightSyncFailed as error:
            self._failed = str(error)
            raise
        self._num_syncs += 1
        return report

    async def _tried(self, version: int) -> WeightSyncReport:
        tries = self._config.tries
        faults: Counter[str] = Counter()
        for number in range(1, tries + 1):
            try:
                return replace(await self._try(version, again=number > 1), tries=number)
            except WeightSyncFailed as error:
                if number == tries:
                    said = f"{tries} tries failed, the last one: {error}" if tries > 1 else error
                    raise WeightSyncFailed(str(said), error.servers) from error
                logger.warning("weight sync %d, try %d: %s", version, number, error)
                faults.update(error.servers)
                await self._settle(error, faults)
        raise AssertionError("weight_sync.tries is at least 1")

    async def _try(self, version: int, *, again: bool) -> WeightSyncReport:
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
        return await self._steps.sync(version, verifies=due or unsure, live=unsure)

    async def _settle(self, error: WeightSyncFailed, faults: Counter[str]) -> None:
        """Prepare for another try. WeightSyncFailed: too few servers are left for one."""
        self._connected = None
        lost = dict(await self._fleet.settle(self._config.settle_s))
        for url, count in faults.items():
            if count >= FAULTS:
                lost.setdefault(url, f"{count} tries failed there: {error}")
        for url, why in lost.items():
            # it may have been given up meanwhile by who watches its process
            if url in self._fleet.urls and not self._lose(url, why):
                cause = "" if why in str(error) else f": {why}"
                raise WeightSyncFailed(f"{error}; without {url} too few servers are left{cause}")
