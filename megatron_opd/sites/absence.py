"""Ends a site whose learner's site is not there for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

SAY_S = 10.0
"""Time in seconds after which the user of a new site is told that no learner answers."""


class LearnerGone(RuntimeError):
    """Reports in one line that the learner's site was not there for too long."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Says how long a site waits for its learner's site.

    address: where that listens. first_s: longest wait in seconds until it is there at first.
    again_s: and once it was there, until it is there again.
    """

    address: str
    first_s: float
    again_s: float


class Absence:
    """Knows whether the learner's site is there. say: tells the user."""

    def __init__(self, patience: Patience, say: Callable[[str], None]) -> None:
        self._patience, self._say = patience, say
        self._was_there = False
        self._there, self._away = asyncio.Event(), asyncio.Event()
        self._away.set()

    def ends(self) -> None:
        """Note that the learner's site is there."""
        self._was_there = True
        self._away.clear()
        self._there.set()

    def begins(self) -> None:
        """Note that nothing is heard of it."""
        self._there.clear()
        self._away.set()

    async def watch(self) -> None:
        """Run until cancelled. LearnerGone."""
        while True:
            await self._away.wait()
            if self._was_there:
                await self._wait(self._patience.again_s, "sites.learner_gone_after_s")
            else:
                await self._first()

    async def _first(self) -> None:
        patience = self._patience
        if patience.first_s > SAY_S:
            try:
                async with asyncio.timeout(SAY_S):
                    await self._there.wait()
            except TimeoutError:
                self._say(
                    f"the learner's site at {patience.address} does not answer yet; waiting for "
                    f"student.startup_timeout_s = {patience.first_s:g} s at most"
                )
                await self._wait(patience.first_s - SAY_S, "student.startup_timeout_s")
        else:
            await self._wait(patience.first_s, "student.startup_timeout_s")

    async def _wait(self, limit_s: float, key: str) -> None:
        patience = self._patience
        try:
            async with asyncio.timeout(limit_s):
                await self._there.wait()
        except TimeoutError:
            whole_s = patience.again_s if self._was_there else patience.first_s
            raise LearnerGone(
                f"the learner's site at {patience.address} was not there for {key} = {whole_s:g} "
                "s: start opd run there (--resume goes on with a run), see that sites.host and "
                "sites.port can be reached from here, and start this site again"
            ) from None
