"""Which support to take: the best at the bytes of m iid draws, and the fewest bytes as good.

Bytes are means over the prefixes, of one of two kinds (enumerate/supports.py): those of all four
wires together, where the weight of an atom takes more than a count of draws does, and those that
the controller holds, where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from studies.prefixes.enumerate.supports import (
    FIXED,
    MONTE_CARLO,
    THIN,
    TOP_K,
    UNBIASED,
    cache_bytes,
    name_of,
    wire_bytes,
)
from studies.prefixes.figures import OUTSIDE, Prefixes, Tree, rounded
from studies.variance.exact import Split

BUDGETS = tuple(Split(0, m) for m in (4, 16, 64))
KINDS = {"monte_carlo": MONTE_CARLO, "fixed": FIXED, "thin": THIN}
FIGURES = {"loss": False, "gradient": True}
Meter = Callable[[Split], float]
"""Says how many bytes a token a support takes."""


def choices(prefixes: Prefixes, *, biased: bool = True) -> Tree:
    """Return, by kind of bytes, the best supports by budget and staleness, and for all.

    biased: top-k, too, whose error is known without truncation alone.
    """
    return {
        kind: {
            "at_equal_bytes": [
                at_bytes_of(prefixes, budget, meter, OUTSIDE if biased else ())
                for budget in BUDGETS
            ],
            "as_good_as": [as_good_as(prefixes, wanted, meter) for wanted in BUDGETS],
        }
        for kind, meter in meters(prefixes).items()
    }


def meters(prefixes: Prefixes) -> dict[str, Meter]:
    """Return the two kinds of bytes."""
    ids = {split: prefixes.ids(split) for split in (*UNBIASED, *TOP_K)}
    return {
        "wire_bytes": lambda split: wire_bytes(split, ids[split]),
        "cache_bytes": lambda split: cache_bytes(ids[split]),
    }


def within(meter: Meter, splits: Iterable[Split], budget: float) -> list[Split]:
    """Return the supports that take no more bytes."""
    return [split for split in splits if meter(split) <= budget]


def at_bytes_of(
    prefixes: Prefixes, monte_carlo: Split, meter: Meter, outsides: Iterable[str]
) -> Tree:
    """Return the best supports that take no more bytes than some iid draws.

    of_monte_carlo: their variance over that of those draws. one_for_all: the support whose largest
    such figure, over stalenesses and over loss and gradient, is least.
    """
    budget = meter(monte_carlo)
    allowed = {kind: within(meter, splits, budget) for kind, splits in KINDS.items()}
    found: Tree = {"bytes_of": name_of(monte_carlo), "bytes": rounded(budget), "best": []}
    for age in prefixes.pairs:
        for figure, gradient in FIGURES.items():
            base = prefixes.ratio(age, monte_carlo, gradient=gradient)
            entry: Tree = {"staleness_updates": int(age), "of": figure}
            for kind in ("fixed", "thin"):
                splits = allowed[kind]
                entry[kind] = best(prefixes, age, splits, base, meter, gradient=gradient)
            entry |= {
                f"top_k_{outside}": best_top(
                    prefixes, age, within(meter, TOP_K, budget), base, meter, outside, gradient
                )
                for outside in outsides
            }
            found["best"].append(entry)
    everything = [split for splits in allowed.values() for split in splits]
    chosen = min(everything, key=lambda split: worst(prefixes, split, monte_carlo))
    found["one_for_all"] = {
        "support": name_of(chosen),
        "bytes": rounded(meter(chosen)),
        "largest_of_monte_carlo": rounded(worst(prefixes, chosen, monte_carlo)),
    }
    return found


def best(
    prefixes: Prefixes, age: str, splits: list[Split], base: float, meter: Meter, *, gradient: bool
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
        "bytes": rounded(meter(chosen)),
    }


def best_top(
    prefixes: Prefixes,
    age: str,
    allowed: list[Split],
    base: float,
    meter: Meter,
    outside: str,
    gradient: bool,
) -> Tree | None:
    """Return the top-k of least mean squared error; None where none is allowed."""
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
        "bytes": rounded(meter(chosen)),
    }


def worst(prefixes: Prefixes, split: Split, monte_carlo: Split) -> float:
    """Return the largest share of some iid draws' variance, over stalenesses, loss and gradient."""
    return max(
        prefixes.ratio(age, split, gradient=gradient)
        / prefixes.ratio(age, monte_carlo, gradient=gradient)
        for age in prefixes.pairs
        for gradient in FIGURES.values()
    )


def as_good_as(prefixes: Prefixes, monte_carlo: Split, meter: Meter) -> Tree:
    """Return the support of fewest bytes whose variance is nowhere above that of some iid draws.

    Nowhere: at no staleness, of loss and gradient, as means over prefixes.
    """
    good = [split for split in UNBIASED if worst(prefixes, split, monte_carlo) <= 1 + 1e-9]
    chosen = min(good, key=meter)
    return {
        "as_good_as": name_of(monte_carlo),
        "bytes_then": rounded(meter(monte_carlo)),
        "support": name_of(chosen),
        "bytes": rounded(meter(chosen)),
        "largest_of_monte_carlo": rounded(worst(prefixes, chosen, monte_carlo)),
    }
