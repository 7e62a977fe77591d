"""Collects the samples of a share that data workers hold, on the head of a model copy."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megatron_opd.data_workers.data_client import CannotFetch, DataClient, by_address
from megatron_opd.transport.frames import with_samples
from megatron_opd.transport.messages import Train
from megatron_opd.wire.keys import RankKeys

SILENT_S = 60.0
"""A worker that gives nothing for so long gives nothing."""


class Collector:
    """Puts together what the controller and data workers send of a share.

    keys: returns those of the ranks. max_bytes: the largest frame that is accepted. timeout_s: how
    long the other ranks wait for this one.
    """

    def __init__(
        self, keys: Callable[[], RankKeys | None], max_bytes: int, timeout_s: float
    ) -> None:
        self._keys, self._max_bytes = keys, max_bytes
        self._silent_s = min(SILENT_S, timeout_s / 2)
        self._client: DataClient | None = None

    def frames(self, request: Train, frames: list[memoryview]) -> list[memoryview]:
        """Return the frames of the whole share, none if samples are not to be had.

        ValueError: what came does not fit.
        """
        wanted = by_address(request.parts)
        keys = self._keys()
        assert keys is not None, "this rank has joined its controller"
        if self._client is None:
            self._client = DataClient(self._max_bytes)
        try:
            fetched = self._client.fetch(wanted, keys, self._silent_s)
        except CannotFetch as error:
            sys.stderr.write(f"update {request.update} lacks samples: data worker {error}\n")
            sys.stderr.flush()
            return []
        return with_samples(frames, request.parts, fetched)

    def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            self._client.close()
