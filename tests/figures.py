"""Measured errors beside their limits, printed at the end of a test run (tests/conftest.py)."""

from dataclasses import dataclass


@dataclass
class Figure:
    """The largest value measured under one name, and the limit every one was held to."""

    worst: float
    limit: float
    times: int = 1


FIGURES: dict[str, Figure] = {}


def bounded(name: str, value: float, limit: float, context: object = "") -> None:
    """Assert value < limit and remember the worst value of `name`."""
    value = float(value)
    assert value < limit, f"{name}: {value} is not below {limit} {context}"
    seen = FIGURES.setdefault(name, Figure(value, limit, 0))
    assert seen.limit == limit, f"{name} is held to two limits"
    seen.worst, seen.times = max(seen.worst, value), seen.times + 1


def relative(ours: float, exact: float) -> float:
    """|ours - exact| / |exact|."""
    return abs(ours - exact) / abs(exact)
