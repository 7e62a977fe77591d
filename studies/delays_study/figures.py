"""What the rows say: figures of a seed, compared within it; 95 % intervals over seeds.

Runs that share a seed share prompts, draws and delays. So every comparison is within a seed, and a
seed counts once: in a group of several settings it is the mean of what it says in each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from studies.delays_study.grid import (
    CONSTANT,
    DRAWN,
    KL,
    METHODS,
    NO_KL,
    PUBLISHED,
    SEEDS,
    SIZE,
    STALE,
    SYNC,
    setting,
)
from studies.grid.statistics import interval, noise_pct

ANSWERS = int(SIZE["evaluation.problems"]) * int(SIZE["evaluation.samples"])
NOISE_PCT = noise_pct(ANSWERS)
CLAIMED_LOSS_PCT = 3.0  # HeteroRL's abstract: at delays of up to 1800 seconds
PAIRS = (("gepo", "gspo"), ("gepo", "grpo"), ("gspo", "grpo"))
ACCURACIES = {"best": "student_accuracy_best_pct", "last": "student_accuracy_after_pct"}
GROUPS = {
    SYNC: [SYNC],
    **{setting(delay, KL): [setting(delay, KL)] for delay in STALE},
    **{setting(delay, NO_KL): [setting(delay, NO_KL)] for delay in STALE},
    **{delay: [setting(delay, KL), setting(delay, NO_KL)] for delay in STALE},
    "drawn": [setting(delay, penalty) for penalty in (KL, NO_KL) for delay in DRAWN],
    setting(CONSTANT, PUBLISHED): [setting(CONSTANT, PUBLISHED)],
}
"""The settings that a figure is the mean of, by name."""
STALE_GROUPS = (*STALE, "drawn")

Row = Mapping[str, Any]
Rows = Mapping[tuple[str, str, int], Row]
"""By setting, method and seed."""
Value = Callable[[str, int], float | None]
"""A figure of a setting and a seed; None where a run is missing."""


def keyed(rows: Sequence[Row]) -> Rows:
    """Rows by what names them."""
    return {(row["setting"], row["method"], row["seed"]): row for row in rows}


def over_seeds(settings: Sequence[str], value: Value, noise: float = 0.0) -> dict[str, Any]:
    """The interval of a figure over seeds; a seed counts where all settings have it."""
    by_seed: list[float | None] = []
    for seed in SEEDS:
        found = [value(each, seed) for each in settings]
        known = [each for each in found if each is not None]
        by_seed.append(statistics.fmean(known) if known and len(known) == len(found) else None)
    return interval(by_seed, noise) | {"by_seed": by_seed}


def less(one: float | None, other: float | None) -> float | None:
    """A difference of what there is."""
    return None if one is None or other is None else one - other


def accuracy(rows: Rows, which: str) -> Callable[[str, str, int], float | None]:
    """Accuracy of a setting, method and seed. which: best or last."""
    key = ACCURACIES[which]
    return lambda name, method, seed: (
        rows[name, method, seed]["summary"][key] if (name, method, seed) in rows else None
    )


def differences(rows: Rows) -> dict[str, dict[str, Any]]:
    """One method's accuracy less another's, in points, by group."""
    found: dict[str, dict[str, Any]] = {}
    for name, settings in GROUPS.items():
        for one, other in PAIRS:
            for which in ACCURACIES:
                of = accuracy(rows, which)
                found.setdefault(name, {})[f"{one}_{other}_{which}"] = over_seeds(
                    settings,
                    lambda s, seed, of=of, a=one, b=other: less(of(s, a, seed), of(s, b, seed)),
                    NOISE_PCT,
                )
    return found


def losses(rows: Rows, claimed: float = 0.0) -> dict[str, dict[str, Any]]:
    """Points that a method loses to delays: accuracy online, without the penalty, less that.

    claimed: a bound, from which the loss is then subtracted.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in STALE_GROUPS:
        for method in METHODS:
            for which in ACCURACIES:
                of = accuracy(rows, which)

                def loss(s: str, seed: int, of: Any = of, method: str = method) -> float | None:
                    lost = less(of(SYNC, method, seed), of(s, method, seed))
                    return less(claimed, lost) if claimed else lost

                key = f"{method}_{which}"
                found.setdefault(name, {})[key] = over_seeds(GROUPS[name], loss, NOISE_PCT)
    return found


def falls(rows: Rows) -> dict[str, dict[str, Any]]:
    """Points from a run's best evaluation to its last, by group and method."""
    best, last = accuracy(rows, "best"), accuracy(rows, "last")
    return {
        name: {
            method: over_seeds(
                settings,
                lambda s, seed, m=method: less(best(s, m, seed), last(s, m, seed)),
                NOISE_PCT,
            )
            for method in METHODS
        }
        for name, settings in GROUPS.items()
    }


def penalties(rows: Rows) -> dict[str, dict[str, Any]]:
    """What CPPO-KL adds to the last accuracy, and its published form less the one of here."""
    last = accuracy(rows, "last")

    def told(delays: Sequence[str], one: str, other: str, method: str) -> dict[str, Any]:
        return over_seeds(
            delays,
            lambda delay, seed: less(
                last(setting(delay, one), method, seed), last(setting(delay, other), method, seed)
            ),
            NOISE_PCT,
        )

    return {
        "kl": {method: told(STALE, KL, NO_KL, method) for method in METHODS},
        PUBLISHED: {method: told((CONSTANT,), PUBLISHED, KL, method) for method in METHODS},
    }


def roughness(row: Row) -> float | None:
    """Mean change of the gradient norm from one update to the next, over its mean."""
    norms = [each for each in row["curves"]["grad_norm"] if each is not None]
    mean = statistics.fmean(norms) if norms else 0.0
    if len(norms) < 2 or mean == 0:
        return None
    return statistics.fmean(abs(b - a) for a, b in pairwise(norms)) / mean


def variance(row: Row) -> float | None:
    """Mean over a run of the variance of the importance weights."""
    known = [each for each in row["curves"]["importance_variance"] if each is not None]
    return statistics.fmean(known) if known else None


STABLE = {"gradient": roughness, "variance": variance}


def stability(rows: Rows) -> dict[str, dict[str, dict[str, Any]]]:
    """Roughness of the gradient norm and variance of the weights: GEPO's less than another's.

    By figure, group and rival; above 0 where GEPO's is the smaller.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for figure, of in STABLE.items():
        values = {key: of(row) for key, row in rows.items()}
        for name in STALE_GROUPS:
            found.setdefault(figure, {})[name] = {
                rival: over_seeds(
                    GROUPS[name],
                    lambda s, seed, values=values, rival=rival: less(
                        values.get((s, rival, seed)), values.get((s, "gepo", seed))
                    ),
                )
                for rival in ("gspo", "grpo")
            }
    return found


STALENESS = "staleness_mean_versions"
CHAIN = {
    "staleness_kl": (STALENESS, "sampler_k3_nats"),
    "kl_variance": ("sampler_k3_nats", "importance_variance"),
    "variance_error": ("importance_variance", "advantage_error"),
    "kl_error": ("sampler_k3_nats", "advantage_error"),
}
"""Of Figs. 6 and 7."""


def correlations(rows: Rows) -> dict[str, dict[str, Any]]:
    """Correlations over the updates of a method's runs that train on old weights' samples.

    Of logarithms, where neither figure is 0; of each seed's runs together, so that seeds give an
    interval. On policy both figures are rounding, or GEPO's bias.
    """
    found: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        for name, pair in CHAIN.items():
            each = [
                _correlation([r["curves"] for (_, m, s), r in rows.items() if (m, s) == at], *pair)
                for at in ((method, seed) for seed in SEEDS)
            ]
            found.setdefault(method, {})[name] = interval(each) | {"by_seed": each}
    return found


def _correlation(curves: Sequence[Mapping[str, Any]], one: str, other: str) -> float | None:
    pairs = [
        (math.log(a), math.log(b))
        for curve in curves
        for a, b, old in zip(curve[one], curve[other], curve[STALENESS], strict=True)
        if old and a and b and a > 0 and b > 0
    ]
    if len(pairs) < 3:
        return None
    return round(statistics.correlation([a for a, _ in pairs], [b for _, b in pairs]), 4)
