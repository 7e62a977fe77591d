"""Parameters of requests to the page of `opd watch` -> which part of a run is read."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from checks.fuzz.engine import Target
from checks.fuzz.mutations import NUMBERS, TEXTS
from megatron_opd.watch.query import (
    BOUNDS,
    LARGEST,
    MOST_BINS,
    MOST_COLUMNS,
    MOST_ROWS,
    MOST_TEXT,
    OTHERS,
    SORTS,
    BadQuery,
    Filters,
    columns_query,
    lanes_query,
    rollouts_query,
)

QUERIES = {"rollouts": rollouts_query, "columns": columns_query, "lanes": lanes_query}
WHOLE: dict[str, dict[str, str]] = {
    "rollouts": {
        **{"update_min": "3", "update_max": "9", "reward_min": "0.5", "sort": "reward"},
        **{"order": "ascending", "upto": "50", "offset": "10", "limit": "20", "text": "Two"},
        **{"outcome": "trained", "teacher": "teacher"},
    },
    "columns": {"columns": "loss,lr"},
    "lanes": {"from_s": "1.5", "to_s": "9", "bins": "100"},
}
NAMES = (*BOUNDS, *OTHERS, "columns", "from_s", "to_s", "bins", "token", "__class__", "")
VALUES = (
    *TEXTS,
    *map(str, NUMBERS[:13]),
    *map(repr, NUMBERS[15:]),
    "1_000",
    "٣",
    " 7 ",
    "+3",
    "1e3",
)
Given = tuple[str, dict[str, str]]


def call(given: Given) -> Any:
    """Parse it."""
    kind, parameters = given
    return QUERIES[kind](parameters)


def oracle(given: Given, found: Any) -> str | None:
    """All numbers are finite and bounded, all words known."""
    kind = given[0]
    if kind == "columns":
        return None if len(found) <= MOST_COLUMNS and all(found) else "too many columns"
    if kind == "lanes":
        from_s, to_s, bins = found
        times = [time for time in (from_s, to_s) if time is not None]
        if not all(0 <= time <= LARGEST for time in times) or not 1 <= bins <= MOST_BINS:
            return "a window that is none"
        return "a window that ends before it begins" if len(times) == 2 and from_s >= to_s else None
    filters, page = found
    assert isinstance(filters, Filters)
    numbers = [getattr(filters, name) for name in BOUNDS]
    if not all(x is None or (math.isfinite(x) and abs(x) <= LARGEST) for x in numbers):
        return "a bound that is none"
    if not (0 <= page.offset <= LARGEST and 1 <= page.limit <= MOST_ROWS):
        return "a page that is none"
    if filters.sort not in SORTS or filters.outcome not in (None, "trained", "dropped"):
        return "a word that is none"
    if filters.upto is not None and not 0 <= filters.upto <= LARGEST:
        return "a count that is none"
    return "a text that is too long" if len(filters.text) > 2 * MOST_TEXT else None


def make(rng: Random) -> Given:
    """Some parameters, one to three of them hostile."""
    kind = rng.choice(list(WHOLE))
    parameters = {name: value for name, value in WHOLE[kind].items() if rng.random() < 0.7}
    for _ in range(rng.randint(1, 3)):
        own = list(WHOLE[kind])
        name = rng.choice((*own, *own, rng.choice(NAMES)))
        parameters[name] = rng.choice((rng.choice(VALUES), str(rng.randint(-5, 3000))))
    return kind, parameters


TARGET = Target("watch_queries", make, call, (BadQuery,), oracle)
