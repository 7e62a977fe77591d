"""Asynchronous, step-off and strictly synchronous training: accuracy against seconds.

What an evaluation takes is counted out, since training waits for it. Seconds mean something only on
a machine that does nothing else: run it alone, with `--jobs 1`. Three processes share the cores, so
the ratio of async to sync is bounded by what they allow; `python -m studies schedules` has the
throughput of every type, with stages that take about as long as each other too.

The control must fail: the fastest schedule with the sign of the advantage turned round.
"""

from __future__ import annotations

from typing import Any

from studies.findings.estimators import ESTIMATORS, Overrides, mc
from studies.findings.figures import BySeed, accuracy, controlled, keyed
from studies.findings.rows import Row
from studies.findings.trial import CHOSEN_LR, CONFIG, LR, NOISE_PCT, SIZE, Study
from studies.grid.statistics import interval
from studies.grid.trials import Trial

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
Curve = list[tuple[float, float]]
TARGETS_PCT = (80.0, 85.0, 90.0)
CONTROL, FASTEST, STRICT = "flipped", "async", "sync"


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


def curve(row: Row) -> Curve:
    """(seconds of training, accuracy) of each evaluation."""
    spent, found = 0.0, []
    for each in row["evaluations"]:
        spent += each["seconds"]
        found.append((each["time_s"] - spent, each["accuracy_pct"]))
    return found


def seconds_to(points: Curve, target_pct: float) -> float | None:
    """Seconds of training after which an evaluation first reaches the target; null: none does."""
    return next((seconds for seconds, value in points if value >= target_pct), None)


def said(rows: list[Row]) -> dict[str, Any]:
    """By schedule: seconds of training, overlap, accuracy, seconds to an accuracy."""
    by_method = {method: runs for (_, method), runs in keyed(rows).items()}
    strict = by_method.get(STRICT, {})
    return {
        "by_schedule": {
            name: _figures(by_method[name], strict) for name in SCHEDULES if name in by_method
        },
        "control": controlled(CONTROL, by_method.get(CONTROL, {}), by_method.get(FASTEST, {})),
    }


def _figures(rows: BySeed, strict: BySeed) -> dict[str, Any]:
    """Of one schedule. strict: runs of the synchronous one, of which those of a seed are paired."""
    curves, of_strict = ({s: curve(row) for s, row in each.items()} for each in (rows, strict))
    paired = sorted(rows.keys() & strict.keys())
    return {
        "seeds": list(rows),
        "seconds": interval([points[-1][0] for points in curves.values()]),
        "times_as_fast_as_sync": interval([of_strict[s][-1][0] / curves[s][-1][0] for s in paired]),
        **{
            key: interval([row["summary"][key] for row in rows.values()])
            for key in ("overlap", "staleness_mean_versions")
        },
        "accuracy_after_pct": interval([accuracy(row) for row in rows.values()], NOISE_PCT),
        "accuracy_less_sync_pct": interval(
            [accuracy(rows[s]) - accuracy(strict[s]) for s in paired], NOISE_PCT
        ),
        "seconds_to_pct": {
            f"{target:g}": interval([seconds_to(points, target) for points in curves.values()])
            for target in TARGETS_PCT
        },
        "curves": list(curves.values()),
    }
