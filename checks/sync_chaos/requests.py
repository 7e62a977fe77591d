"""Keeps requests in flight, repeats what a lost server had, and looks at what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness.requests import in_flight
from sglang_bridge.errors import BridgeError
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import RolloutReply, RolloutRequest
from sglang_bridge.retry import Backoff, is_lost_connection, retried

TRIES = 5
TOKENS = 48


class Requests:
    """Sampling as rollouts do it. lost: what each request that did not come back said.

    version: the newest one that there is.
    """

    def __init__(self, fleet: Fleet, slots: int, vocab_size: int, version: int) -> None:
        self._fleet, self._slots, self._vocab_size = fleet, slots, vocab_size
        self._version = version
        self.restarted = 0
        self.servers_stopped = False
        self.lost: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sample inside the block; what is in flight at its end is waited for, if servers go on."""
        name, tokens = f"chaos-{self._version}", range(TOKENS, TOKENS + 1)
        async with in_flight(self._ask, self._slots, self._vocab_size, tokens, name) as slots:
            try:
                yield
            finally:
                if self.servers_stopped:
                    for slot in slots:
                        slot.cancel()

    async def _ask(self, request: RolloutRequest) -> None:
        try:
            reply = await retried(
                lambda earlier: self._once(request, earlier), Backoff(TRIES), is_lost_connection
            )
        except BridgeError as error:
            self.lost.append(str(error))
            return
        versions = [version for version, _, _ in reply.spans]
        there = {self._version - 1, self._version}
        if versions != sorted(versions) or not set(versions) <= there:
            self.lost.append(f"{request.rid}: versions {versions} in weight sync {self._version}")

    async def _once(self, request: RolloutRequest, earlier: int) -> RolloutReply:
        self.restarted += earlier > 0
        return await self._fleet.generate(request)
