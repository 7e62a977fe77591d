"""Rollouts whose delay is drawn: GRPO, GSPO, GEPO, each with CPPO-KL and without (GEPO sec. 4.1).

    python -m benchmarks delays_study [--limit N] [--budget-s S]

What benchmarks/staleness.py holds equal is held equal here. Each update's batch is as old as a
delay that is drawn for it (schedule.delays): the paper's 60 to 1800 seconds stand for 2 to 64
updates, by a log-normal, a Weibull or an exponential distribution of which 99.5% lie between them;
constant: 64 updates always; online: none. The staleness of a batch is exact, so that timing decides
nothing. The student is evaluated every 16 updates: best and last accuracy, as in Table 2.

90 runs, one factor at a time, most telling first: for every seed the paper's recipe (the penalty
with delays, none online), constant and log-normal delays before the others; then the runs of that
seed with the penalty the other way round. Rows are kept in
benchmarks/results/delays_study_rows.jsonl; stopped, the study goes on where it was.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grid.statistics import interval
from benchmarks.grid.study import run_study
from benchmarks.grid.trials import RESULTS, Launch, Trial, finished_rows, launch
from benchmarks.staleness import (
    COMMON,
    CONFIG,
    CPPO_KL,
    LARGEST_DELAY,
    METHODS,
    SEEDS,
    SIZE,
)

EVALUATIONS = {"evaluation.every": "16", "evaluation.blocks": "true"}
DRAWN = ("lognormal", "weibull", "exponential")
DELAYS = ("constant", "lognormal", "online", "weibull", "exponential")
NO_KL = {"objective.kl": "null"}
PENALTIES = {"kl": CPPO_KL, "no_kl": NO_KL}


def trial(delay: str, penalty: str, method: str, seed: int) -> Trial:
    """One run."""
    held = {
        "schedule.type": "controlled",
        "schedule.max_staleness": "0" if delay == "online" else str(LARGEST_DELAY),
    }
    if delay in DRAWN:
        held["schedule.delays"] = f"{{type: {delay}, low_s: 60, high_s: 1800}}"
    loss = {"objective": f"{{type: {method}}}"} | COMMON | PENALTIES[penalty]
    return Trial(f"{delay}_{penalty}", method, seed, CONFIG, SIZE | EVALUATIONS | held | loss)


def trials() -> list[Trial]:
    """The grid, in the order in which it is run."""
    papers = [(delay, "no_kl" if delay == "online" else "kl") for delay in DELAYS]
    others = [(delay, "kl" if penalty == "no_kl" else "no_kl") for delay, penalty in papers]
    return [
        trial(delay, penalty, method, seed)
        for seed in SEEDS
        for delay, penalty in (*papers, *others)
        for method in METHODS
    ]


STALENESS = "staleness_mean_versions"
PAIRS = {
    "staleness_kl": (STALENESS, "sampler_k3_nats"),
    "kl_variance": ("sampler_k3_nats", "importance_variance"),
    "variance_error": ("importance_variance", "advantage_error"),
    "kl_error": ("sampler_k3_nats", "advantage_error"),
}
"""Of Figs. 6 and 7."""


def correlations(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Correlations over the updates of a method's runs that train on old weights' samples.

    Of logarithms, where neither figure is 0. On policy both are rounding, or GEPO's bias.
    """
    found: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        curves = [row["curves"] for row in rows if row["method"] == method]
        found[method] = {name: _correlation(curves, *pair) for name, pair in PAIRS.items()}
    return found


def _correlation(curves: Sequence[dict[str, Any]], one: str, other: str) -> dict[str, Any] | None:
    pairs = [
        (math.log(a), math.log(b))
        for curve in curves
        for a, b, old in zip(curve[one], curve[other], curve[STALENESS], strict=True)
        if old and a and b and a > 0 and b > 0
    ]
    if len(pairs) < 3:
        return None
    value = statistics.correlation([a for a, _ in pairs], [b for _, b in pairs])
    return {"correlation": round(value, 3), "updates": len(pairs)}


ACCURACIES = {"best": "student_accuracy_best_pct", "last": "student_accuracy_after_pct"}
RIVALS = ("gspo", "grpo")


def differences(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """GEPO's accuracy less another method's, in points, with 95% intervals over seeds.

    Each difference is of runs of one seed, delay and penalty. A seed counts once: under a name of
    several settings (delay, or drawn: all that are drawn, with the penalty and without) it is the
    mean of its differences, as runs that share a seed share prompts, draws and delays.
    """
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    groups = {setting: [setting] for setting in settings}
    for delay in DELAYS:
        groups[delay] = [f"{delay}_{penalty}" for penalty in PENALTIES]
    groups["drawn"] = [setting for delay in DRAWN for setting in groups[delay]]
    accuracy = {(row["setting"], row["method"], row["seed"]): row["summary"] for row in rows}
    found: dict[str, dict[str, Any]] = {}
    for name, members in groups.items():
        for rival in RIVALS:
            for which, key in ACCURACIES.items():
                by_seed = [
                    _difference(accuracy, members, seed, key, ("gepo", rival)) for seed in SEEDS
                ]
                of_group = found.setdefault(name, {})
                of_group[f"gepo_{rival}_{which}"] = interval(by_seed) | {"by_seed": by_seed}
    return found


def _difference(
    accuracy: Mapping[tuple[str, str, int], dict[str, Any]],
    settings: Sequence[str],
    seed: int,
    key: str,
    methods: tuple[str, str],
) -> float | None:
    """Mean over settings; None unless all of them have a run of both methods that was evaluated."""
    found: list[float] = []
    for setting in settings:
        one, other = (accuracy.get((setting, method, seed), {}).get(key) for method in methods)
        if one is None or other is None:
            return None
        found.append(one - other)
    return statistics.fmean(found)


def measure(options: Sequence[str] = (), launch: Launch = launch, **paths: Path) -> dict[str, Any]:
    """Run what is missing; everything by (delay and penalty, method)."""
    found = run_study("delays_study", trials(), options, launch=launch, **paths)
    size = SIZE | EVALUATIONS
    rows = finished_rows(trials(), paths.get("rows", RESULTS / "delays_study_rows.jsonl"))
    found["correlations"] = correlations(list(rows.values()))
    found["differences"] = differences(list(rows.values()))
    return {"config": str(CONFIG), "size": size, "common": COMMON | CPPO_KL, **found}
