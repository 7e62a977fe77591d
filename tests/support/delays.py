"""Delays that a test names, in place of buffer.delays.DelayStream."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Delays:
    """Delays in seconds by the number of a message; 0 for all others."""

    by_number: Mapping[int, float] = field(default_factory=dict)

    def seconds(self, number: int) -> float:
        return self.by_number.get(number, 0.0)
