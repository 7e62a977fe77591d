"""Defines what the catalogue says of one column of a run's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Group = Literal["train", "rollout", "teacher", "perf", "weight_sync", "eval"]
"""What a column is about; sinks that group columns name it GROUP/COLUMN."""
GROUPS: tuple[Group, ...] = get_args(Group)
Names = Literal["opd", "slime", "verl"]
"""Whose metric names a sink uses (metrics.names)."""


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
    """Describes one column.

    unit: of its values; "" for a plain number. text: what it is. healthy: where a good run is, a
    rule of thumb; None where no number says so. action: what to do when it leaves the range, or
    moves in a way that text calls bad. aliases: the same quantity in the same unit by the name that
    slime (and miles) or verl give it. differs: how theirs is averaged or counted otherwise.
    """

    column: str
    group: Group
    unit: str
    text: str
    healthy: Range | None = None
    action: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    differs: str = ""

    def tag(self, names: Names) -> str:
        """Return the name a sink shows: the alias where there is one, else GROUP/COLUMN."""
        return self.aliases.get(names, f"{self.group}/{self.column}")
