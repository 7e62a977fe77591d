"""Lets the student's servers and the learner use the memory of the same GPUs in turn.

    before an update: the servers release KV cache and weights -> the learner takes its memory
    in a weight sync: the learner gives it up -> the servers take back the weights, receive new
                      ones -> they take back the KV cache -> they continue

Invariant: no step asks for memory before the step that frees it has ended. What stays resident
besides is listed in docs/schedules.md. Every step may be repeated, and a server that joins between
two of them has nothing to take back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from sglang_bridge import wire

logger = logging.getLogger(__name__)


class ReleasingFleet(Protocol):
    """Names the methods of sglang_bridge.fleet.Fleet that share memory."""

    async def release_memory(self) -> Mapping[str, frozenset[str]]:
        """Return {server url: the tags that it frees}, once all have given up their memory."""
        ...

    async def resume_memory(self, tags: Sequence[str] = ...) -> None:
        """Let every server take back what these tags name."""
        ...

    async def restore_memory(self, urls: Sequence[str], limit_s: float) -> Mapping[str, str]:
        """Let these servers take back all of it; return {url: why} of those that did not."""
        ...


class OffloadingLearner(Protocol):
    """Names the methods of transport.zmq.RemoteLearner that share memory."""

    async def offload(self) -> None:
        """Move what only an update needs out of device memory."""
        ...

    async def onload(self) -> None:
        """Take it back."""
        ...


class MemoryTurns:
    """Performs the steps that hand memory from one side to the other.

    Each of them fails as the fleet or the learner does; steps.py names it and bounds its time.
    """

    def __init__(self, fleet: ReleasingFleet, learner: OffloadingLearner) -> None:
        self._fleet, self._learner = fleet, learner
        self._said: set[tuple[str, str]] = set()

    async def release_servers(self) -> None:
        """Release what the servers can; none may be at work. Warns once of what they keep."""
        for url, freed in (await self._fleet.release_memory()).items():
            kept = {(url, tag) for tag in wire.MEMORY_TAGS if tag not in freed} - self._said
            if kept:
                self._said |= kept
                logger.warning(
                    "schedule.time_shared: %s frees no GPU memory of %s, which needs CUDA and a "
                    "server started with --enable-memory-saver --enable-weights-cpu-backup; the "
                    "turns are taken all the same",
                    url,
                    " and ".join(sorted(tag for _, tag in kept)),
                )

    async def onload_learner(self) -> None:
        """Give the learner what it trains with, after `release_servers`."""
        await self._learner.onload()

    async def offload_learner(self) -> None:
        """Release what the learner needs for updates alone."""
        await self._learner.offload()

    async def resume_weights(self) -> None:
        """Give the servers room for new weights, after `offload_learner`."""
        await self._fleet.resume_memory((wire.WEIGHTS,))

    async def resume_cache(self) -> None:
        """Give the servers what they sample with, after all weights have come."""
        await self._fleet.resume_memory((wire.KV_CACHE,))

    async def restore(self, urls: Sequence[str], limit_s: float) -> None:
        """Leave these servers with all their memory; warns of those that did not take it back."""
        for url, why in (await self._fleet.restore_memory(urls, limit_s)).items():
            logger.warning("%s has not taken back its memory: %s", url, why)
