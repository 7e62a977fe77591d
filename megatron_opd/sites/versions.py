"""Writes every version of the weights to disk, from where sites pull it.

A weight sync is done once its version is written, hashed and offered; no site is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable

from megatron_opd.config.schema import Config
from megatron_opd.metrics.types import Phase, WeightSyncReport
from megatron_opd.records.types import ALONE, LearnerTurn
from megatron_opd.sites.version_server import VersionServer
from megatron_opd.weight_sync.disk_messages import Open, Write, num_written
from megatron_opd.weight_sync.transport import AskLearner
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.weights.manifest import version_name

logger = logging.getLogger(__name__)


class SiteVersions:
    """Implements controller.ports.WeightSyncer for a run whose samplers are sites.

    Args:
        ask: hands a request to the learner's part of the disk transport.
        config: the run's.
        server: offers versions to sites.
    """

    def __init__(self, ask: AskLearner, config: Config, server: VersionServer) -> None:
        self._ask, self._config, self._server = ask, config, server
        self._stream = ""
        self._num_written = 0
        self._newest: str | None = None
        self._is_sound = False  # whether the next version may hold changes of the last one

    async def open(self, *, used: bool = False) -> None:
        """Let the learner make the directory of versions. WeightSyncFailed: it cannot.

        used: means nothing here: sites of an earlier controller take what this one offers.
        """
        config = self._config
        self._stream = f"run-{uuid.uuid4().hex[:12]}"
        owner = f"{socket.gethostname()}:{config.run.dir.absolute()}"
        await num_written(self._ask, Open(self._stream, owner, config.student.dtype))
        self._is_sound = False

    async def sync(self, version: int, turn: LearnerTurn = ALONE) -> WeightSyncReport:
        """Write `version` and offer it to all sites. WeightSyncFailed: it cannot be written."""
        tries = self._config.weight_sync.tries
        for number in range(1, tries + 1):
            try:
                report = await self._written(version, number)
                break
            except WeightSyncFailed as error:
                logger.warning("weight sync %d, try %d: %s", version, number, error)
                self._is_sound = False
                if number == tries:
                    raise
        await self._server.offer_newest()
        return report

    async def make_room(self) -> None:
        """Return at once: the learner shares nothing with the sites."""

    async def until_none_serves(self) -> None:
        """Return never: a site has weights from its start on."""
        await self._server.failed()

    async def serve_on(self, current: Callable[[], int | None], learner: asyncio.Lock) -> None:
        """Return never: a site that comes is offered what there is. Raises what fails there."""
        await self._server.failed()

    async def start_over(self) -> None:
        """Prepare for another learner. WeightSyncFailed: it cannot make its directory.

        Nothing that the one before it has written is offered or sent any more; sites must join
        anew.
        """
        await self.close()
        self._newest = None
        await self.open()

    async def close(self) -> None:
        """Close all versions, which the learner deletes at its end."""
        await self._server.close()

    async def _written(self, version: int, tries: int) -> WeightSyncReport:
        clock = asyncio.get_running_loop().time
        settings = self._config.weight_sync
        assert settings.directory is not None, "the configuration requires it"
        name = version_name(self._num_written, version)
        self._num_written += 1
        began_s = clock()
        written = Write(name, version, not self._is_sound, self._newest)
        num_bytes = await num_written(self._ask, written)
        wrote_s = clock()
        directory = settings.directory.absolute() / self._stream
        try:
            await asyncio.to_thread(self._server.add, directory, name)
        except (OSError, ValueError) as error:
            raise WeightSyncFailed(f"{directory / name}: {error}") from error
        self._newest, self._is_sound = name, True
        done_s = clock()
        phases = (Phase("stage", began_s, wrote_s), Phase("offer", wrote_s, done_s))
        return WeightSyncReport(version, phases, num_bytes, done_s, done_s, tries)
