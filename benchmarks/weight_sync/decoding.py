"""Counts the tokens that a fleet samples, second by second."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import RolloutRequest

PROMPT_TOKENS = 16
# Short: a reply's tokens count when it is there. What is half done when a window begins and what is
# half done when it ends are as much, on average. Of several lengths, or all slots end together.
LEAST_TOKENS, MOST_TOKENS = 1, 8


class Decoding:
    """Keeps `slots` requests in flight and remembers when their tokens came."""

    def __init__(self, fleet: Fleet, slots: int, vocab_size: int) -> None:
        self._fleet, self._slots, self._vocab_size = fleet, slots, vocab_size
        self._replies: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sample inside the block; what fails in a slot is raised at its end."""
        ended = asyncio.Event()
        slots = [asyncio.create_task(self._slot(ended)) for _ in range(self._slots)]
        try:
            yield
        finally:
            ended.set()
            await asyncio.gather(*slots)

    async def tokens_until(self, began: float, seconds: float) -> int:
        """Wait until `seconds` after `began`, by time.monotonic(); the tokens since then."""
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        return sum(tokens for at, tokens in self._replies if began <= at < began + seconds)

    async def _slot(self, ended: asyncio.Event) -> None:
        random = np.random.default_rng(next(self._numbers))
        while not ended.is_set():
            prompt = random.integers(0, self._vocab_size, PROMPT_TOKENS).astype(np.int32)
            name = f"benchmark-{next(self._numbers)}"
            length = int(random.integers(LEAST_TOKENS, MOST_TOKENS + 1))
            request = RolloutRequest(rid=name, input_ids=prompt, max_new_tokens=length)
            reply = await self._fleet.generate(request)
            self._replies.append((time.monotonic(), len(reply.output_ids_T)))
