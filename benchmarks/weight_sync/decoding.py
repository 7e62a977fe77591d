"""Counts the tokens that a fleet samples, second by second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from harness.requests import in_flight
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import RolloutRequest

# Short: a reply's tokens count when it is there. What is half done when a window begins and what is
# half done when it ends are as much, on average. Of several lengths, or all slots end together.
TOKENS = range(1, 9)


class Decoding:
    """Keeps `slots` requests in flight and remembers when their tokens came."""

    def __init__(self, fleet: Fleet, slots: int, vocab_size: int) -> None:
        self._fleet, self._slots, self._vocab_size = fleet, slots, vocab_size
        self._replies: list[tuple[float, int]] = []

    def running(self) -> AbstractAsyncContextManager[Sequence[asyncio.Task[None]]]:
        """Sample inside the block; what fails in a slot is raised at its end."""
        return in_flight(self._ask, self._slots, self._vocab_size, TOKENS)

    async def tokens_until(self, began: float, seconds: float) -> int:
        """Wait until `seconds` after `began`, by time.monotonic(); the tokens since then."""
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        return sum(tokens for at, tokens in self._replies if began <= at < began + seconds)

    async def _ask(self, request: RolloutRequest) -> None:
        reply = await self._fleet.generate(request)
        self._replies.append((time.monotonic(), len(reply.output_ids_T)))
