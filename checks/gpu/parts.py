"""The parts of a check, the most telling first, and how much of the budget each may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part: the module of this package that measures it.

    least_s: it is not begun with less time left. most_s: it is ended after so many seconds.
    """

    name: str
    least_s: float
    most_s: float

    def limit_s(self, left_s: float) -> float | None:
        """How long it may run when `left_s` of the budget is left; None: not at all."""
        return None if left_s < self.least_s else min(self.most_s, left_s)


PARTS = (
    Part("installed", least_s=5, most_s=30),
    Part("tests", least_s=20, most_s=105),
    Part("lean", least_s=20, most_s=90),
    Part("sampling", least_s=15, most_s=45),
    Part("same_device", least_s=15, most_s=30),
    Part("step", least_s=45, most_s=150),
    Part("run", least_s=60, most_s=240),
)
