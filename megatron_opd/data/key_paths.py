"""Finds the value that a key leads to in a row, such as reward_model.ground_truth.

Invariant: what is named exactly wins, so that a column with a dot in its name is found by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from megatron_opd.data.faults import Unusable
from megatron_opd.data.plain import plain

ABSENT: Final = object()
"""What `lookup` returns where there is nothing, not even null."""


def lookup(row: Mapping[str, Any], key: str, before: str = "") -> Any:
    """Return what `key` leads to, or ABSENT; null where something on the way is null.

    before: the key that led to `row`, for people.

    Raises Unusable for a key that leads into what holds nothing by name or index.
    """
    if key in row:
        return row[key]
    for name, rest in splits(key):
        if name in row:
            return _inside(row[name], before + name, rest)
    return ABSENT


def column_of(columns: Sequence[str], key: str) -> str:
    """Return the column of a table in which `key` is looked up; `key` where there is none."""
    names = (name for name in (key, *(name for name, _ in splits(key))) if name in columns)
    return next(names, key)


def splits(key: str) -> Iterator[tuple[str, str]]:
    """Yield every way to divide a key in two at a dot, the longest beginning first."""
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:count]), ".".join(parts[count:])


def _inside(value: Any, name: str, rest: str) -> Any:
    value = plain(value, name)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return lookup(value, rest, f"{name}.")
    if isinstance(value, list | tuple):
        index, _, behind = rest.partition(".")
        if index.isascii() and index.isdigit() and len(index) < 10:
            if int(index) >= len(value):
                return ABSENT
            each = value[int(index)]
            return _inside(each, f"{name}.{index}", behind) if behind else each
    kind = type(value).__name__
    raise Unusable("wrong_type", f"{name!r} must hold {rest!r}, but it is a {kind}")
