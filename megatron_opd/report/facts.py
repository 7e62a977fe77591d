"""Defines what the rules of the report look at, and what they find."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_opd.report.run_data import RunData

Level = Literal["bad", "warning"]

FEW_UPDATES = 8
"""Updates before which nothing is said about idle time and trends: the pipeline fills first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Says what is wrong, by which figures, and what to do.

    bad: the run failed, or learns nothing.
    """

    level: Level
    title: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Holds what rules look at. figures: see run_figures. now_s: seconds since 1970."""

    run: RunData
    figures: Mapping[str, float]
    now_s: float

    def figure(self, name: str) -> float:
        """Return a figure, NaN where it is not known: comparisons with it are false."""
        return self.figures.get(name, math.nan)

    def key(self, name: str) -> str:
        """Return `key (now VALUE)`, or the key alone where the configuration is not known."""
        value = self.run.setting(name)
        return name if value is None else f"{name} (now {value})"


Rule = Callable[[Facts], Iterator[Finding]]
"""Yields what one rule finds; nothing where all is well, or too little is known."""
