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
    merge(name, value, limit, 1)


def merge(name: str, worst: float, limit: float, times: int) -> None:
    """Add what was measured `times` times under `name`, here or in another process."""
    seen = FIGURES.setdefault(name, Figure(worst, limit, 0))
    assert seen.limit == limit, f"{name} is held to two limits"
    seen.worst, seen.times = max(seen.worst, worst), seen.times + times


def relative(ours: float, exact: float) -> float:
    """|ours - exact| / |exact|."""
    return abs(ours - exact) / abs(exact)
