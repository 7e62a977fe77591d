"""Lets the student's own servers score for a teacher, without starving what they sample.

Invariant: while the servers sample, scores take at most their share of the time: busy seconds are
at most share * elapsed + one score's, from any moment at which nothing was owed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from megatron_opd.rollout.scorer import ChangingWeights

Answer = TypeVar("Answer")

LOOK_AGAIN_S = 0.1
"""Longest time until it is seen that nothing is left to sample."""
SAVED_S = 1.0
"""Most seconds of scoring that time without scores earns."""


class StudentShare:
    """Asks the student's servers for scores, in a share of the time; see rollout.scorer.

    Args:
        live: makes sure of one version.
        share: of the time, in (0, 1).
        in_flight: returns the requests that the servers have, scores included.
    """

    def __init__(self, live: ChangingWeights, share: float, in_flight: Callable[[], int]) -> None:
        self._live, self._share, self._in_flight = live, share, in_flight
        self._scoring = 0
        self._saved_s = 0.0  # seconds of scoring that may begin; below 0, those that are owed
        self._since_s = asyncio.get_running_loop().time()
        self._turn = asyncio.Lock()

    async def of_one_version(self, ask: Callable[[], Awaitable[Answer]]) -> tuple[Answer, int]:
        """Return an answer of the servers, and the version that gave all of it.

        It begins in its turn, first come first served; one that a weight sync met has its turn.
        """
        async with self._turn:
            while not self._may_begin():
                wait_s = -self._saved_s / self._share if not self._scoring else LOOK_AGAIN_S
                await asyncio.sleep(min(max(wait_s, 1e-3), LOOK_AGAIN_S))
            self._scoring += 1
        try:
            return await self._live.of_one_version(ask)
        finally:
            self._scoring -= 1
            self._count(scored=True)

    def _may_begin(self) -> bool:
        self._count(scored=self._scoring > 0)
        return self._saved_s >= 0

    def _count(self, *, scored: bool) -> None:
        """Count the time since the last call, in which there were scores or not."""
        now_s = asyncio.get_running_loop().time()
        passed_s, self._since_s = now_s - self._since_s, now_s
        if self._in_flight() <= self._scoring:  # nothing is sampled: nothing is owed
            self._saved_s = max(self._saved_s, 0.0)
            return
        rate = self._share - 1 if scored else self._share
        self._saved_s = min(self._saved_s + rate * passed_s, SAVED_S)
