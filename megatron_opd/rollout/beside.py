"""Measures some batches beside a run, by questions to its servers that nothing waits for.

The answers become columns of the next row that is written after them. A request that fails is not
repeated, and costs the figures of one batch.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.records.types import AnySample, Batch, Sample, sample_here
from sglang_bridge.errors import BridgeError

logger = logging.getLogger(__name__)

Columns = dict[str, float | int | None]
Whole = Callable[[AnySample], Awaitable[Sample]]
"""Returns a sample with its arrays. SamplesLost: they are gone."""


async def here(sample: AnySample) -> Sample:
    """Return a sample whose arrays are in this process."""
    return sample_here(sample)


class BesideProbe(ABC):
    """Measures the batch of every so many updates, one at a time.

    Args:
        what: is measured, for people: a noun with its article.
        prefix: of its columns.
        every: updates between two measurements.
    """

    def __init__(self, what: str, prefix: str, every: int) -> None:
        self._what, self._prefix, self._every = what, prefix, every
        self._run_id = uuid.uuid4().hex[:8]
        self._task: asyncio.Task[Columns] | None = None
        self._warned = False

    @abstractmethod
    async def measured(self, batch: Batch) -> Columns:
        """Return the figures of a batch; none where it has nothing to measure.

        Raises BridgeError, SamplesLost.
        """

    def start(self, batch: Batch) -> None:
        """Begin to measure a batch if it is its turn and the one before is done."""
        if self._task is None and batch.update % self._every == 0:
            self._task = asyncio.get_running_loop().create_task(
                self._columns(batch), name=self._what
            )

    def columns(self) -> Mapping[str, float | int | None]:
        """Return the figures that have come since the last call; nothing while there are none."""
        if self._task is None or not self._task.done():
            return {}
        task, self._task = self._task, None
        return task.result()

    def stop(self) -> None:
        """Give up what is under way."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _columns(self, batch: Batch) -> Columns:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            found = await self.measured(batch)
        except (BridgeError, SamplesLost) as error:
            self.tell_once(batch, str(error))
            return {}
        if not found:
            return {}
        about = {f"{self._prefix}update": batch.update, f"{self._prefix}s": clock() - began_s}
        return found | about

    def tell_once(self, batch: Batch, why: str) -> None:
        """Warn that a batch was not measured, the first time."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "update %d: %s was not measured (%s); more of this kind are not told",
                batch.update,
                self._what,
                why,
            )
