"""Keeps requests in flight on servers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np

from sglang_bridge.protocol import RolloutRequest

PROMPT_TOKENS = 16
Ask = Callable[[RolloutRequest], Awaitable[None]]


@asynccontextmanager
async def in_flight(
    ask: Ask, slots: int, vocab_size: int, lengths: range, name: str = "benchmark"
) -> AsyncIterator[Sequence[asyncio.Task[None]]]:
    """Ask with random prompts inside the block, `slots` requests at a time; yields the slots.

    lengths: of responses, in tokens, one of which is drawn. name: begins the ids of requests. At
    the block's end what is in flight is waited for, and what failed is raised; a slot that was
    cancelled has not failed.
    """
    numbers, ended = itertools.count(), asyncio.Event()

    async def slot() -> None:
        random = np.random.default_rng(next(numbers))
        while not ended.is_set():
            prompt = random.integers(0, vocab_size, PROMPT_TOKENS).astype(np.int32)
            rid, length = f"{name}-{next(numbers)}", int(random.choice(lengths))
            await ask(RolloutRequest(rid=rid, input_ids=prompt, max_new_tokens=length))

    tasks = [asyncio.create_task(slot()) for _ in range(slots)]
    try:
        yield tasks
    finally:
        ended.set()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Exception):
                raise found
