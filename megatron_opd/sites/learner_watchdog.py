"""Ends a site whose learner's site cannot be reached for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from megatron_opd.config.schema import Config
from megatron_opd.sites.keys import SiteKeys

SAY_S = 10.0
"""Time in seconds after which the user of a new site is told that no learner answers."""


class LearnerGone(RuntimeError):
    """Reports in one line that the learner's site was not there for too long."""


@dataclass(frozen=True, slots=True)
class LearnerTimeouts:
    """Says how long a site waits for its learner's site.

    address: where that listens. first_s: longest wait in seconds for the first connection. again_s:
    longest wait in seconds for another one, once the link is broken.
    """

    address: str
    first_s: float
    again_s: float

    @classmethod
    def of(cls, config: Config, keys: SiteKeys) -> Self:
        """Return those of a site. config: its own."""
        first_s, again_s = config.student.startup_timeout_s, config.sites.learner_gone_after_s
        return cls(keys.address, first_s, again_s)


class LearnerWatchdog:
    """Raises LearnerGone once the learner's site is unreachable for too long.

    Args:
        timeouts: how long that is.
        say: tells the user.
    """

    def __init__(self, timeouts: LearnerTimeouts, say: Callable[[str], None]) -> None:
        self._timeouts, self._say = timeouts, say
        self._was_connected = False
        self._connected, self._disconnected = asyncio.Event(), asyncio.Event()
        self._disconnected.set()

    def link_up(self) -> None:
        """Note that the learner's site is heard."""
        self._was_connected = True
        self._disconnected.clear()
        self._connected.set()

    def link_down(self) -> None:
        """Note that the link to the learner's site is broken."""
        self._connected.clear()
        self._disconnected.set()

    async def watch(self) -> None:
        """Run until cancelled. LearnerGone."""
        while True:
            await self._disconnected.wait()
            if self._was_connected:
                await self._wait(self._timeouts.again_s, "sites.learner_gone_after_s")
            else:
                await self._first()

    async def _first(self) -> None:
        timeouts = self._timeouts
        if timeouts.first_s > SAY_S:
            try:
                async with asyncio.timeout(SAY_S):
                    await self._connected.wait()
            except TimeoutError:
                self._say(
                    f"the learner's site at {timeouts.address} does not answer yet; waiting for "
                    f"student.startup_timeout_s = {timeouts.first_s:g} s at most"
                )
                await self._wait(timeouts.first_s - SAY_S, "student.startup_timeout_s")
        else:
            await self._wait(timeouts.first_s, "student.startup_timeout_s")

    async def _wait(self, limit_s: float, key: str) -> None:
        timeouts = self._timeouts
        try:
            async with asyncio.timeout(limit_s):
                await self._connected.wait()
        except TimeoutError:
            whole_s = timeouts.again_s if self._was_connected else timeouts.first_s
            raise LearnerGone(
                f"the learner's site at {timeouts.address} was not there for {key} = {whole_s:g} "
                "s: start opd run there (--resume goes on with a run), see that sites.host and "
                "sites.port can be reached from here, and start this site again"
            ) from None
