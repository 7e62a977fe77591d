"""Keeps requests in flight, repeats what a lost server had, and looks at what comes back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from sglang_bridge.errors import BridgeError
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import RolloutReply, RolloutRequest
from sglang_bridge.retry import Backoff, is_lost_connection, retried

TRIES = 5
PROMPT_TOKENS, MOST_TOKENS = 16, 48


class Requests:
    """Sampling as rollouts do it. lost: what each request that did not come back said.

    version: the newest one that there is.
    """

    def __init__(self, fleet: Fleet, slots: int, vocab_size: int, version: int) -> None:
        self._fleet, self._slots, self._vocab_size = fleet, slots, vocab_size
        self._version = version
        self._numbers = itertools.count()
        self.restarted = 0
        self.servers_stopped = False
        self.lost: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sample inside the block; what is in flight at its end is waited for, if servers go on."""
        ended = asyncio.Event()
        slots = [asyncio.create_task(self._slot(ended)) for _ in range(self._slots)]
        try:
            yield
        finally:
            ended.set()
            if self.servers_stopped:
                for slot in slots:
                    slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)

    async def _slot(self, ended: asyncio.Event) -> None:
        random = np.random.default_rng(next(self._numbers))
        while not ended.is_set():
            prompt = random.integers(0, self._vocab_size, PROMPT_TOKENS).astype(np.int32)
            name, length = f"chaos-{self._version}-{next(self._numbers)}", MOST_TOKENS
            request = RolloutRequest(rid=name, input_ids=prompt, max_new_tokens=length)
            try:
                reply = await retried(
                    lambda earlier, asked=request: self._once(asked, earlier),
                    Backoff(TRIES),
                    is_lost_connection,
                )
            except BridgeError as error:
                self.lost.append(str(error))
                continue
            versions = [version for version, _, _ in reply.spans]
            if versions != sorted(versions) or not set(versions) <= {
                self._version - 1,
                self._version,
            }:
                self.lost.append(f"{name}: versions {versions} in weight sync {self._version}")

    async def _once(self, request: RolloutRequest, earlier: int) -> RolloutReply:
        self.restarted += earlier > 0
        return await self._fleet.generate(request)
