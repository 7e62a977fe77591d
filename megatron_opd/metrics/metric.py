"""Defines what the catalogue says of one column of a run's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds the values of a healthy run, both ends included; None: no bound on that side."""

    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether `value` is inside; a value that is no number never is."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        """Return the range as text, such as `0 to 0.2` or `>= 0.5`."""
        if self.low is not None and self.high is not None:
            return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return f">= {self.low:g}" if self.low is not None else f"<= {self.high:g}"


@dataclass(frozen=True, slots=True)
class Metric:
    """Describes a column.

    unit: of its values; "" for a plain number. text: what it is. healthy: where a good run is, a
    rule of thumb; None where no number says so. action: what to do when it leaves the range, or
    moves in a way that text calls bad. aliases: the same quantity in the same unit by the name that
    slime (and miles) or verl give it. differs: how theirs is averaged or counted otherwise.
    """

    unit: str
    text: str
    healthy: Range | None = None
    action: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    differs: str = ""
