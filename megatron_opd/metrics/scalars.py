"""Turns rows into named numbers, for sinks that draw curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_opd.metrics.catalogue import tag_of
from megatron_opd.metrics.metric import Names

_AXES = {"update", "set"}  # of a row of evaluations: its step and its tag


def scalars(row: Mapping[str, Any], names: Names) -> dict[str, float]:
    """Return the finite numbers of an update's row: GROUP/COLUMN, or the alias of `names`."""
    return {tag_of(column, names): value for column, value in _numbers(row)}


def evaluation_scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of an evaluated set: eval/SET/COLUMN, or .../COLUMN/KEY inside."""
    found: dict[str, float] = {}
    for column, value in row.items():
        tag = f"eval/{row['set']}/{column}"
        if isinstance(value, Mapping):  # pass@k by k
            found |= {f"{tag}/{key}": number for key, number in _numbers(value)}
        elif column not in _AXES and _is_number(value):
            found[tag] = float(value)
    return found


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    return ((column, float(value)) for column, value in row.items() if _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
