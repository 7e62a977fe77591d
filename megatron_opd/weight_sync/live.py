"""Tells which version a fleet's servers hold, and makes sure that an answer is of one version.

Invariant: what `of_one_version` returns began and ended between the same two weight syncs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Answer = TypeVar("Answer")


class LiveVersion:
    """Holds the version of some servers' weights; 0: those that they started with."""

    def __init__(self) -> None:
        self._version = 0
        self._changes = 0
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def version(self) -> int | None:
        """Returns the version that all servers hold; None: they may hold others, or a mixture."""
        return self._version if self._settled.is_set() else None

    def changes(self) -> None:
        """Note that the weights change from now on."""
        self._changes += 1
        self._settled.clear()

    def settle(self, version: int) -> None:
        """Note that all servers hold `version` from now on."""
        self._version = version
        self._settled.set()

    async def of_one_version(self, ask: Callable[[], Awaitable[Answer]]) -> tuple[Answer, int]:
        """Return an answer of the servers, and the version that gave all of it.

        It waits for a weight sync that is under way. An answer during which one began is thrown
        away and asked for again: servers go on with half-computed work under the new weights.
        """
        while True:
            while not self._settled.is_set():  # the next one may begin before a waiter wakes
                await self._settled.wait()
            version, changes = self._version, self._changes
            answer = await ask()
            if changes == self._changes:
                return answer, version
