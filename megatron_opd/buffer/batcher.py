"""Batches of exactly B samples in admission order; only the last of a finite run may be smaller."""

from __future__ import annotations

from megatron_opd.buffer.buffer import SampleBuffer
from megatron_opd.types import Sample


class Batcher:
    """Cuts a SampleBuffer's line into batches.

    Args:
        buffer: where samples arrive.
        batch_size: B.
    """

    def __init__(self, buffer: SampleBuffer, batch_size: int) -> None:
        self._buffer = buffer
        self._batch_size = batch_size

    async def next_batch(self) -> tuple[Sample, ...]:
        """The next B samples; fewer only when no more can come; empty when there are none left."""
        while self._buffer.ready < self._batch_size and not self._buffer.exhausted:
            await self._buffer.changed()
        return self._buffer.take(min(self._batch_size, self._buffer.ready))
