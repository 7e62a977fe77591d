"""Turns rows of figures into columns of numbers, and long columns into as many as a screen shows.

Axes: R rows, in the order of their updates; P points that are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

DoubleArray = npt.NDArray[np.float64]
MOST_POINTS = 1600
"""Points of a curve: two for every pixel column of a wide chart."""


@dataclass(frozen=True, slots=True)
class Table:
    """Holds the numbers of a run. Every array is float64 [R]; NaN: null, or not in that row.

    update_R: 0-based, rising. time_s_R: since the run's begin. columns: by name, numbers alone.
    """

    update_R: DoubleArray
    time_s_R: DoubleArray
    columns: Mapping[str, DoubleArray]

    def __len__(self) -> int:
        """Return the number of rows, R."""
        return len(self.update_R)

    def values(self, column: str) -> DoubleArray:
        """Return the numbers of a column without its nulls; empty where there is none."""
        found = self.columns.get(column)
        return np.empty(0) if found is None else found[np.isfinite(found)]

    def has(self, column: str) -> bool:
        """Return whether any row has a number for it."""
        return len(self.values(column)) > 0


@dataclass(frozen=True, slots=True)
class Points:
    """Holds what is drawn of a Table, by column [P]; null where there is nothing to draw."""

    update_P: Sequence[float]
    time_s_P: Sequence[float | None]
    columns: Mapping[str, Sequence[float | None]]


def table_of(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Make the table of rows of metrics.jsonl. Of two rows of one update the later one counts.

    Rows without an update are left out, and so are columns that hold no number at all.
    """
    by_update = {update: row for row in rows if (update := _update(row)) is not None}
    ordered = [by_update[update] for update in sorted(by_update)]
    names = dict.fromkeys(name for row in ordered for name in row)
    columns = {name: np.array([number(row.get(name)) for row in ordered]) for name in names}
    found = {name: column for name, column in columns.items() if np.isfinite(column).any()}
    time_s_R = found.get("time_s", np.full(len(ordered), math.nan))
    return Table(np.array(sorted(by_update), dtype=np.float64), time_s_R, found)


def number(value: Any) -> float:
    """Return a JSON value as a finite float; NaN where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def points_of(table: Table, most: int = MOST_POINTS) -> Points:
    """Return at most `most` points of every column.

    A longer column is cut into most / 2 bins of rows, and of each bin the smallest and the largest
    number are kept, in the order in which they came: a spike of one update stays visible.
    """
    if len(table) <= most:
        return Points(
            table.update_R.tolist(),
            _rounded(table.time_s_R),
            {name: _rounded(column) for name, column in table.columns.items()},
        )
    edges = np.linspace(0, len(table), most // 2 + 1).astype(int)
    ends = np.stack([edges[:-1], edges[1:] - 1], axis=1).ravel()  # first and last row of each bin
    return Points(
        table.update_R[ends].tolist(),
        _rounded(table.time_s_R[ends]),
        {name: _rounded(_extremes(column, edges)) for name, column in table.columns.items()},
    )


def _update(row: Mapping[str, Any]) -> int | None:
    update = row.get("update")
    return update if type(update) is int and 0 <= update < 2**53 else None


def _extremes(column_R: DoubleArray, edges: npt.NDArray[np.int_]) -> DoubleArray:
    """Return the extremes of the finite numbers of each bin, NaN twice for a bin without any."""
    missing = np.isnan(column_R)
    starts = edges[:-1]
    low = np.minimum.reduceat(np.where(missing, np.inf, column_R), starts)
    high = np.maximum.reduceat(np.where(missing, -np.inf, column_R), starts)
    pairs = np.stack([low, high], axis=1)
    for index, (start, stop) in enumerate(zip(starts, edges[1:], strict=True)):
        part = column_R[start:stop]
        if np.isnan(part).all():
            pairs[index] = math.nan
        elif np.nanargmax(part) < np.nanargmin(part):
            pairs[index] = pairs[index, ::-1]
    return pairs.ravel()


def _rounded(column: DoubleArray) -> list[float | None]:
    """Return JSON numbers of six digits, which is more than a chart shows."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in column.tolist()]
