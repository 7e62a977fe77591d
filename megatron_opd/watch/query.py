"""Parses what a page asks for: every parameter has a type and bounds, unknown ones are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MOST_ROWS = 200
"""Rows of a list in one answer."""
MOST_BINS = 2000
MOST_COLUMNS = 64
MOST_TEXT = 1000
"""Characters of a text that is looked for."""
LARGEST = 1e15
"""Largest number that is accepted: times and counts stay exact below it."""

Sort = Literal["update", "reward", "staleness", "tokens", "gap"]
SORTS: tuple[Sort, ...] = ("update", "reward", "staleness", "tokens", "gap")


class BadQuery(ValueError):
    """Reports in one line which parameter is wrong."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Says which rollouts are wanted; None: any.

    Bounds are inclusive. outcome: "trained" or "dropped". text: looked for in prompt and response,
    whatever its case. upto: rows that existed when the list was opened, so that it does not move
    while it is read.
    """

    update_min: float | None = None
    update_max: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    staleness_min: float | None = None
    staleness_max: float | None = None
    outcome: Literal["trained", "dropped"] | None = None
    drop_reason: str | None = None
    teacher: str | None = None
    text: str = ""
    sort: Sort = "update"
    descending: bool = True
    upto: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Says which part of a list is wanted."""

    offset: int
    limit: int


Parameters = Mapping[str, str]
BOUNDS = tuple(
    f"{name}_{end}" for name in ("update", "reward", "staleness") for end in ("min", "max")
)
OTHERS = ("outcome", "drop_reason", "teacher", "text", "sort", "order", "upto", "offset", "limit")


def rollouts_query(given: Parameters) -> tuple[Filters, Page]:
    """Parse the parameters of a list of rollouts. Raises BadQuery."""
    refuse_unknown(given, (*BOUNDS, *OTHERS))
    bounds = {name: number(given, name, -LARGEST, LARGEST) for name in BOUNDS}
    upto = whole(given, "upto", 0, int(LARGEST))
    filters = Filters(
        **bounds,
        outcome=_choice(given, "outcome", ("trained", "dropped"), None),
        drop_reason=given.get("drop_reason") or None,
        teacher=given.get("teacher") or None,
        text=_short(given, "text").lower(),
        sort=_choice(given, "sort", SORTS, "update"),
        descending=_choice(given, "order", ("ascending", "descending"), "descending")
        == "descending",
        upto=upto,
    )
    offset = whole(given, "offset", 0, int(LARGEST)) or 0
    limit = whole(given, "limit", 1, MOST_ROWS)
    return filters, Page(offset, 50 if limit is None else limit)


def columns_query(given: Parameters) -> tuple[str, ...]:
    """Parse the names of columns. Raises BadQuery."""
    refuse_unknown(given, ("columns",))
    names = tuple(name for name in given.get("columns", "").split(",") if name)
    if len(names) > MOST_COLUMNS:
        raise BadQuery(f"columns must name at most {MOST_COLUMNS}, got {len(names)}")
    return names


def lanes_query(given: Parameters) -> tuple[float | None, float | None, int]:
    """Parse the begin and end in seconds, and the number of bins. Raises BadQuery."""
    refuse_unknown(given, ("from_s", "to_s", "bins"))
    from_s, to_s = number(given, "from_s", 0, LARGEST), number(given, "to_s", 0, LARGEST)
    if from_s is not None and to_s is not None and from_s >= to_s:
        raise BadQuery(f"from_s must be below to_s, got {from_s:g} and {to_s:g}")
    bins = whole(given, "bins", 1, MOST_BINS)
    return from_s, to_s, 600 if bins is None else bins


def refuse_unknown(given: Parameters, known: tuple[str, ...]) -> None:
    """Raise BadQuery for a parameter that is none of `known`."""
    for name in given:
        if name not in known:
            raise BadQuery(f"unknown parameter {name[:40]!r}; known: {', '.join(known)}")


def number(given: Parameters, name: str, least: float, most: float) -> float | None:
    """Return a number in [least, most], None when it is missing or empty. Raises BadQuery."""
    text = given.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise BadQuery(f"{name} must be a number from {least:g} to {most:g}, got {text[:40]!r}")
    return value


def whole(given: Parameters, name: str, least: int, most: int) -> int | None:
    """Return a whole number in [least, most], None when it is missing. Raises BadQuery."""
    text = given.get(name, "").strip()
    if not text:
        return None
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not least <= value <= most:
        raise BadQuery(f"{name} must be a whole number from {least} to {most}, got {text[:40]!r}")
    return value


def _short(given: Parameters, name: str) -> str:
    text = given.get(name, "")
    if len(text) > MOST_TEXT:
        raise BadQuery(f"{name} must have at most {MOST_TEXT} characters, got {len(text)}")
    return text


def _choice(given: Parameters, name: str, choices: tuple[str, ...], default: str | None) -> ...:
    value = given.get(name) or default
    if value is not None and value not in choices:
        raise BadQuery(f"{name} must be one of {', '.join(choices)}, got {value[:40]!r}")
    return value
