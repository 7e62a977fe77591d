"""Declares what a server records beside the ids of a draw cache, once for all that carry it.

The server's record, its wire, the parser and every record downstream take names, types and lengths
from here, so that a new column is declared here and filled in server/draws.py. A column's name ends
in its axis: N one value per cached id, T one per response token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

Float32s = TypeVar("Float32s")
"""Stands for float32 numbers: a numpy array, or a tensor in a learner."""
Float64s = TypeVar("Float64s")
"""Stands for float64 numbers: a numpy array, or a tensor in a learner."""

_DTYPES: dict[Any, type[np.generic]] = {Float32s: np.float32, Float64s: np.float64}


@dataclass(frozen=True, kw_only=True)
class DrawColumns(Generic[Float32s]):
    """Holds the values that a server records.

    weight_N: what the cached id weighs in an expectation, >= 0; see protocol.DrawCache.
    sampler_logp_N: its log-prob under the distribution that was sampled from (after temperature,
    top-k, top-p, min-p) when it was drawn.
    """

    weight_N: Float32s
    sampler_logp_N: Float32s


@cache
def dtypes(record: type[Any]) -> dict[str, np.dtype[Any]]:
    """Return {column: type of its numbers} of a dataclass: its fields that are flat arrays."""
    hints = get_type_hints(record)
    found = {field.name: _dtype(hints[field.name]) for field in fields(record)}
    return {name: np.dtype(dtype) for name, dtype in found.items() if dtype is not None}


def arrays_of(record: Any, kind: type[Any]) -> dict[str, Any]:
    """Return {column: values} of those columns of `record` that `kind` declares."""
    return {name: getattr(record, name) for name in dtypes(kind)}


def axis_of(column: str) -> str:
    """Return the axis that a column's name ends in."""
    return column.rpartition("_")[2]


def _dtype(hint: Any) -> type[np.generic] | None:
    if get_origin(hint) is np.ndarray:
        return get_args(get_args(hint)[1])[0]
    return _DTYPES.get(hint)
