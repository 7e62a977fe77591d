"""Tells the user when nothing comes from any site for long, and how each of them does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

REMEDY = (
    "start sites that are away; where weights are too far behind, raise sites.max_staleness (with "
    "permits schedule.max_staleness) or let them travel faster"
)


class Silence:
    """Notices that nothing comes.

    Args:
        limit_s: so long, in seconds, until the user is told, once for each silence.
        is_due: returns whether anything is waited for.
        standings: returns how each site does.
        say: tells the user.
    """

    def __init__(
        self,
        limit_s: float,
        is_due: Callable[[], bool],
        standings: Callable[[], Iterable[str]],
        say: Callable[[str], None],
    ) -> None:
        self._limit_s, self._is_due = limit_s, is_due
        self._standings, self._say = standings, say
        self._heard = asyncio.Event()

    def broken(self) -> None:
        """Note that an answer to a prompt has come."""
        self._heard.set()

    async def watch(self) -> None:
        """Run until cancelled."""
        while True:
            self._heard.clear()
            try:
                async with asyncio.timeout(self._limit_s):
                    await self._heard.wait()
            except TimeoutError:
                if self._is_due():
                    self._say(
                        f"no site has sent a sample for {self._limit_s:g} s "
                        f"(sites.max_delay_s): {', '.join(self._standings())}; {REMEDY}"
                    )
                    await self._heard.wait()
