"""Cuts batches of exactly B samples in admission order; what is left over at a run's end is fewer.

With hold_batches = h a batch leaves only when h more wait scored behind it (AsyncOPD App. B: the
cache depth of a staleness study), until no more samples can come. Then the rest drains.
"""

from __future__ import annotations

from megatron_opd.buffer.buffer import SampleBuffer
from megatron_opd.buffer.rejection import SampleRejected
from megatron_opd.records.drops import INCOMPLETE_BATCH
from megatron_opd.records.types import AnySample


class BatchIncomplete(SampleRejected):
    """Reports that the prompts ended before the sample's batch was full."""

    def __init__(self, count: int, batch_size: int) -> None:
        super().__init__(INCOMPLETE_BATCH, f"{count} of {batch_size} samples were left")


class Batcher:
    """Cuts batches from the front of a SampleBuffer.

    Args:
        buffer: where samples arrive.
        batch_size: B.
        hold_batches: h.
    """

    def __init__(self, buffer: SampleBuffer, batch_size: int, hold_batches: int = 0) -> None:
        self._buffer = buffer
        self._batch_size = batch_size
        self._needed = (hold_batches + 1) * batch_size
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Returns whether there will be no further batch, whatever is left."""
        return self._stopped

    def stop(self) -> None:
        """Cut no further batch; what is left stays in the buffer."""
        self._stopped = True
        self._buffer.wake()

    async def next_batch(self) -> tuple[AnySample, ...]:
        """Return the next B samples: fewer only when no more can come, empty when none are left."""
        while not self._stopped and self._buffer.ready < self._needed:
            if self._buffer.exhausted:
                break
            await self._buffer.changed()
        if self._stopped:
            return ()
        return self._buffer.take(min(self._batch_size, self._buffer.ready))
