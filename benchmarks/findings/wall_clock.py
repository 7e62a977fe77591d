"""Asynchronous, step-off and strictly synchronous training: accuracy against seconds.

What an evaluation takes is counted out, since training waits for it. Seconds mean something only on
a machine that does nothing else: run it alone, with `--jobs 1`. Three processes share the cores, so
the ratio of async to sync is bounded by what they allow; `python -m benchmarks schedules` has the
throughput of every type, with stages that take about as long as each other too.
"""

from __future__ import annotations

from typing import Any

from benchmarks.findings.estimators import Overrides, mc
from benchmarks.findings.figures import accuracy
from benchmarks.findings.rows import Row
from benchmarks.findings.trial import CHOSEN_LR, CONFIG, LR, SIZE, Study
from benchmarks.grid.statistics import interval
from benchmarks.grid.trials import Trial

NAME, SOURCE = "wall_clock", "AsyncOPD Figs. 11-12, Tables 2, 7"
SEEDS = (1, 2, 3)
SCHEDULES: dict[str, Overrides] = {
    "sync": {"schedule": "{type: sync}"},
    "step_off": {"schedule": "{type: step_off, max_staleness: 2}"},
    "async": {"schedule": "{type: async, max_staleness: 4}"},
}
DRAWS = {"mc1": {"support": "{type: path}"}, "mc64": mc(64)}
RECIPE: Overrides = {
    LR: CHOSEN_LR,
    "run.deterministic": "false",
    "evaluation.every": "16",
    "evaluation.blocks": "true",
}
TARGETS_PCT = (60.0, 70.0, 80.0)


def study() -> Study:
    """Its runs: every schedule and number of draws, seed by seed."""
    runs = [
        Trial(f"clock_{draws}", name, seed, CONFIG, SIZE | RECIPE | cached | schedule)
        for seed in SEEDS
        for draws, cached in DRAWS.items()
        for name, schedule in SCHEDULES.items()
    ]
    return Study(NAME, SOURCE, tuple(runs))


def curve(row: Row) -> list[tuple[float, float]]:
    """(seconds of training, accuracy) of each evaluation."""
    spent, found = 0.0, []
    for each in row["evaluations"]:
        spent += each["seconds"]
        found.append((each["time_s"] - spent, each["accuracy_pct"]))
    return found


def seconds_to(row: Row, target_pct: float) -> float | None:
    """Seconds of training after which an evaluation first reaches the target; null: none does."""
    return next((seconds for seconds, value in curve(row) if value >= target_pct), None)


def said(rows: list[Row]) -> dict[str, Any]:
    """By number of draws and schedule: throughput, overlap, accuracy, seconds to an accuracy."""
    found: dict[str, Any] = {}
    for draws in DRAWS:
        for name in SCHEDULES:
            mine = [
                row for row in rows if row["setting"] == f"clock_{draws}" and row["method"] == name
            ]
            if mine:
                found.setdefault(draws, {})[name] = _figures(mine)
    return {"by_draws": found}


def _figures(rows: list[Row]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        key: interval([row["summary"][key] for row in rows])
        for key in ("train_tokens_per_s", "overlap", "staleness_mean_versions")
    }
    return figures | {
        "seeds": [row["seed"] for row in rows],
        "accuracy_after_pct": interval([accuracy(row) for row in rows]),
        "seconds_to_pct": {
            f"{target:g}": interval([seconds_to(row, target) for row in rows])
            for target in TARGETS_PCT
        },
        "curves": [curve(row) for row in rows],
    }
