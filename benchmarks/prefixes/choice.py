"""Which support to take: the best at the bytes of m iid draws, and the fewest bytes as good.

Bytes are those of all four wires together (enumerate/supports.py), means over the prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.prefixes.enumerate.supports import (
    FIXED,
    MONTE_CARLO,
    THIN,
    TOP_K,
    UNBIASED,
    name_of,
    wire_bytes,
)
from benchmarks.prefixes.figures import OUTSIDE, Prefixes, Tree, rounded
from benchmarks.variance.exact import Split

BUDGETS = tuple(Split(0, m) for m in (4, 16, 64))
KINDS = {"monte_carlo": MONTE_CARLO, "fixed": FIXED, "thin": THIN}
FIGURES = {"loss": False, "gradient": True}


def choices(prefixes: Prefixes) -> Tree:
    """Return the best supports by budget, by staleness and for all stalenesses."""
    return {
        "at_equal_bytes": [at_bytes_of(prefixes, budget) for budget in BUDGETS],
        "as_good_as": [as_good_as(prefixes, wanted) for wanted in BUDGETS],
    }


def bytes_of(prefixes: Prefixes, split: Split) -> float:
    """Return a support's bytes a token on the wires."""
    return wire_bytes(split, prefixes.ids(split))


def within(prefixes: Prefixes, splits: Iterable[Split], budget: float) -> list[Split]:
    """Return the supports that take no more bytes."""
    return [split for split in splits if bytes_of(prefixes, split) <= budget]


def at_bytes_of(prefixes: Prefixes, monte_carlo: Split) -> Tree:
    """Return the best supports that take no more bytes than some iid draws.

    of_monte_carlo: their variance over that of those draws. one_for_all: the support whose largest
    such figure, over stalenesses and over loss and gradient, is least.
    """
    budget = bytes_of(prefixes, monte_carlo)
    allowed = {kind: within(prefixes, splits, budget) for kind, splits in KINDS.items()}
    found: Tree = {"bytes_of": name_of(monte_carlo), "wire_bytes": rounded(budget), "best": []}
    for age in prefixes.pairs:
        for figure, gradient in FIGURES.items():
            base = prefixes.ratio(age, monte_carlo, gradient=gradient)
            entry: Tree = {"staleness_updates": int(age), "of": figure}
            for kind, splits in allowed.items():
                entry[kind] = best(prefixes, age, splits, base, gradient=gradient)
            entry |= {
                f"top_k_{outside}": best_top(prefixes, age, budget, base, outside, gradient)
                for outside in OUTSIDE
            }
            found["best"].append(entry)
    everything = [split for splits in allowed.values() for split in splits]
    chosen = min(everything, key=lambda split: worst(prefixes, split, monte_carlo))
    found["one_for_all"] = {
        "support": name_of(chosen),
        "wire_bytes": rounded(bytes_of(prefixes, chosen)),
        "largest_of_monte_carlo": rounded(worst(prefixes, chosen, monte_carlo)),
    }
    return found


def best(
    prefixes: Prefixes, age: str, splits: list[Split], base: float, *, gradient: bool
) -> Tree | None:
    """Return the support of least variance; None where none is allowed."""
    if not splits:
        return None
    ratios = {split: prefixes.ratio(age, split, gradient=gradient) for split in splits}
    chosen = min(splits, key=ratios.__getitem__)
    return {
        "support": name_of(chosen),
        "r": rounded(ratios[chosen]),
        "of_monte_carlo": rounded(ratios[chosen] / base),
        "wire_bytes": rounded(bytes_of(prefixes, chosen)),
    }


def best_top(
    prefixes: Prefixes, age: str, budget: float, base: float, outside: str, gradient: bool
) -> Tree | None:
    """Return the top-k of least mean squared error; None where none is allowed."""
    allowed = within(prefixes, TOP_K, budget)
    if not allowed:
        return None
    ratios = {
        split: prefixes.top_ratio(age, split.atoms, outside, gradient=gradient) for split in allowed
    }
    chosen = min(allowed, key=ratios.__getitem__)
    return {
        "support": name_of(chosen),
        "mse_r": rounded(ratios[chosen]),
        "of_monte_carlo": rounded(ratios[chosen] / base),
        "wire_bytes": rounded(bytes_of(prefixes, chosen)),
    }


def worst(prefixes: Prefixes, split: Split, monte_carlo: Split) -> float:
    """Return the largest share of some iid draws' variance, over stalenesses, loss and gradient."""
    return max(
        prefixes.ratio(age, split, gradient=gradient)
        / prefixes.ratio(age, monte_carlo, gradient=gradient)
        for age in prefixes.pairs
        for gradient in FIGURES.values()
    )


def as_good_as(prefixes: Prefixes, monte_carlo: Split) -> Tree:
    """Return the support of fewest bytes whose variance is nowhere above that of some iid draws.

    Nowhere: at no staleness, of loss and gradient, as means over prefixes.
    """
    good = [split for split in UNBIASED if worst(prefixes, split, monte_carlo) <= 1 + 1e-9]
    chosen = min(good, key=lambda split: bytes_of(prefixes, split))
    return {
        "as_good_as": name_of(monte_carlo),
        "wire_bytes_then": rounded(bytes_of(prefixes, monte_carlo)),
        "support": name_of(chosen),
        "wire_bytes": rounded(bytes_of(prefixes, chosen)),
        "largest_of_monte_carlo": rounded(worst(prefixes, chosen, monte_carlo)),
    }
