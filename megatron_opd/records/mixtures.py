"""Says what mixture of teachers scores a prompt: names with weights that sum to one."""

from __future__ import annotations

import math
from collections.abc import Mapping

Shares = tuple[tuple[str, float], ...]
"""(teacher, weight) of each teacher that is asked, by name; weights > 0 that sum to one."""
SUM_SLACK = 1e-6
"""Largest distance from 1 of the sum of weights as they are written."""


def weights_fault(weights: Mapping[str, float]) -> str | None:
    """Return what is wrong with a mixture's weights, in words and with a remedy, or None."""
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            return f"weights must be finite and >= 0, got {name}: {weight:g}"
    total = math.fsum(weights.values())
    if abs(total - 1) <= SUM_SLACK:
        return None
    if not total:
        return "weights must sum to 1, got no weight above 0; give the teachers that score some"
    meant = ", ".join(f"{name}: {weight / total:.7g}" for name, weight in weights.items())
    return f"weights must sum to 1, got {total:.7g}; write {{{meant}}}"


def shares_of(weights: Mapping[str, float]) -> Shares:
    """Return who is asked, by name: nobody whose weight is 0. weights: without a fault."""
    total = math.fsum(weights.values())
    return tuple((name, weights[name] / total) for name in sorted(weights) if weights[name])


def label_of(shares: Shares) -> str:
    """Return the name of a mixture in records: code:0.3+math:0.7; of one teacher its own."""
    if len(shares) == 1:
        return shares[0][0]
    return "+".join(f"{name}:{weight:.6g}" for name, weight in shares)


def shares_fault(shares: Shares) -> str | None:
    """Return why these are not the shares of a mixture, or None; there are none without one."""
    names, weights = [name for name, _ in shares], [weight for _, weight in shares]
    sound = (
        len(shares) != 1
        and names == sorted(set(names))
        and all(0 < weight <= 1 for weight in weights)
        and (not shares or abs(math.fsum(weights) - 1) <= SUM_SLACK)
    )
    return None if sound else "a mixture of teachers that cannot be"
