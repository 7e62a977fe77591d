"""Compares two runs: whether their rows of metrics.jsonl agree, column by column.

Columns of time, memory, queues and servers are left out: no two runs agree in them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_opd.metrics import hint_leak, opd_health

Row = Mapping[str, Any]

_OF_THE_MACHINE = {
    "peak_rss_bytes",
    "tflops_per_rank",
    "mfu",
    "rolling_samples",
    "scoring_samples",
    "buffered_samples",
    "permits_in_use",
    "window_learner_idle_ratio",
    "window_sampler_idle_ratio",
    "servers",  # who sampled what depends on who was free
    "turn_cached_fraction",  # on who sampled the turn before, and whether it still has the keys
}
_BESIDE = (opd_health.PREFIX, hint_leak.PREFIX)
_SECONDS = re.compile(r"_s(_mean|_max)?$")


def is_of_time(column: str) -> bool:
    """Return whether a column tells how fast a run was rather than what it learnt.

    Health and hints are measured beside the run: in which row they are, and of which weights,
    depends on time.
    """
    of_the_machine = column in _OF_THE_MACHINE or column.startswith(_BESIDE)
    return of_the_machine or _SECONDS.search(column) is not None


@dataclass(frozen=True, slots=True)
class ColumnDifference:
    """Describes one column that differs.

    first_update: where it is not for the first time. updates: in how many rows. relative: the
    largest abs(a - b) / max(abs(a), abs(b)); infinite where one of the two is no finite number.
    """

    column: str
    first_update: int
    updates: int
    relative: float


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Holds the result: updates both runs have, columns compared, differences by first update."""

    updates: int
    columns: tuple[str, ...]
    left_out: tuple[str, ...]
    differences: tuple[ColumnDifference, ...]

    def beyond(self, tolerance: float) -> tuple[ColumnDifference, ...]:
        """Return the differences above a relative tolerance; 0 asks for bitwise equality."""
        return tuple(each for each in self.differences if each.relative > tolerance)


def compare_rows(a: Sequence[Row], b: Sequence[Row]) -> RunComparison:
    """Compare row i of one run with row i of the other, as far as both go."""
    pairs = list(zip(a, b, strict=False))
    names = sorted({column for pair in pairs for row in pair for column in row})
    left_out = tuple(filter(is_of_time, names))
    columns = tuple(name for name in names if not is_of_time(name))
    found = [_difference(column, pairs) for column in columns]
    differences = sorted(filter(None, found), key=lambda each: (each.first_update, each.column))
    return RunComparison(len(pairs), columns, left_out, tuple(differences))


def _difference(column: str, pairs: Sequence[tuple[Row, Row]]) -> ColumnDifference | None:
    relative = [_relative(one.get(column), other.get(column)) for one, other in pairs]
    rows = [index for index, value in enumerate(relative) if value > 0]
    if not rows:
        return None
    return ColumnDifference(column, rows[0], len(rows), max(relative))


def _relative(a: Any, b: Any) -> float:
    if isinstance(a, bool) is not isinstance(b, bool):  # true equals 1 in Python
        return math.inf
    if a == b or (_is_nan(a) and _is_nan(b)):
        return 0.0
    if not (isinstance(a, int | float) and isinstance(b, int | float)):
        return math.inf
    try:
        ratio = abs(a - b) / max(abs(a), abs(b))
    except (OverflowError, ZeroDivisionError):  # beyond float64; nan beside 0
        return math.inf
    # nan where one of the two is infinite or nan, and would compare as no difference
    return math.inf if math.isnan(ratio) else ratio


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
