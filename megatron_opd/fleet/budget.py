"""Bounds how often one part of a run is started again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

PERIOD_S = 3600.0
"""A budget holds for so long: a part that lasts is not given up for what was long ago."""


@dataclass
class Budget:
    """Counts the restarts of one part, each when it is begun, by the event loop's clock."""

    _began_s: list[float] = field(default_factory=list[float])

    @property
    def spent(self) -> int:
        """Returns how many there have been."""
        return len(self._began_s)

    @property
    def recent(self) -> int:
        """Returns how many there have been within PERIOD_S."""
        now_s = asyncio.get_running_loop().time()
        return sum(now_s - began_s < PERIOD_S for began_s in self._began_s)

    def spend(self) -> None:
        """Count one more."""
        self._began_s.append(asyncio.get_running_loop().time())
