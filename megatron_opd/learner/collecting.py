"""Collects the samples of a share that data workers hold, on the head of a model copy."""

from __future__ import annotations

from collections.abc import Callable

from megatron_opd.transport.frames import with_samples
from megatron_opd.transport.keys import RankKeys
from megatron_opd.transport.messages import Train
from megatron_opd.workers.taking import Taking, by_address

TAKE_S = 60.0
"""A worker that gives nothing for so long is taken for lost."""


class Collector:
    """Puts together what the controller and data workers send of a share.

    keys: returns those of the ranks. max_bytes: the largest frame that is accepted.
    """

    def __init__(self, keys: Callable[[], RankKeys | None], max_bytes: int) -> None:
        self._keys, self._max_bytes = keys, max_bytes
        self._taking: Taking | None = None

    def frames(self, request: Train, frames: list[memoryview]) -> list[memoryview]:
        """Return the frames of the whole share, none if samples are not to be had.

        ValueError: what came does not fit.
        """
        wanted = by_address(request.parts)
        keys = self._keys()
        assert keys is not None, "this rank has joined its controller"
        if self._taking is None:
            self._taking = Taking(self._max_bytes)
        taken = self._taking.take(wanted, keys, TAKE_S)
        if taken is None:  # by new connections: one may be lost without its worker
            taken = self._taking.take(wanted, keys, TAKE_S)
        if taken is None:
            return []
        return with_samples(frames, request.parts, taken)

    def close(self) -> None:
        """Close all connections."""
        if self._taking is not None:
            self._taking.close()
