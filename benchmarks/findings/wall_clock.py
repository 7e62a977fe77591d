"""Asynchronous, step-off and strictly synchronous training: accuracy against seconds.

What an evaluation takes is counted out, since training waits for it. Seconds mean something only on
a machine that does nothing else: run it alone, with `--jobs 1`. Three processes share the cores, so
the ratio of async to sync is bounded by what they allow; `python -m benchmarks schedules` has the
throughput of every type, with stages that take about as long as each other too.

The control must fail: with the sign of the advantage turned round the fastest schedule may reach no
accuracy at all.
"""

from __future__ import annotations

from typing import Any

from benchmarks.findings.estimators import ESTIMATORS, Overrides, mc
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
SETTING = "clock"
RECIPE: Overrides = mc(64) | {
    LR: CHOSEN_LR,
    "run.deterministic": "false",
    "evaluation.every": "16",
    "evaluation.blocks": "true",
}
TARGETS_PCT = (60.0, 70.0, 80.0)
CONTROL, FASTEST = "flipped", "async"


def study() -> Study:
    """Its runs: every schedule and the control, seed by seed."""
    wrong = SCHEDULES[FASTEST] | ESTIMATORS[CONTROL]
    return Study(
        NAME,
        SOURCE,
        tuple(
            Trial(SETTING, name, seed, CONFIG, SIZE | RECIPE | changed)
            for seed in SEEDS
            for name, changed in (SCHEDULES | {CONTROL: wrong}).items()
        ),
    )


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
    """By schedule: throughput, overlap, accuracy, seconds to an accuracy."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    wrong = by_method.get(CONTROL, [])
    reached = [seconds_to(row, TARGETS_PCT[0]) for row in wrong]
    return {
        "by_schedule": {name: _figures(by_method[name]) for name in SCHEDULES if name in by_method},
        "control": {
            "estimator": CONTROL,
            "accuracy_after_pct": interval([accuracy(row) for row in wrong]),
            "fails": all(seconds is None for seconds in reached) if wrong else None,
        },
    }


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
