"""Costs fitted to one recorded run, and what they predict of runs that they have not seen.

    python -m benchmarks calibration [--runs DIR] > benchmarks/results/calibration.json

Reads the runs of `python -m benchmarks schedules` (runs/schedules), which have traces. Costs and
lengths are fitted to one run of schedule async; every other run that is listed below is simulated
with its own configuration and these costs: other schedules, another split of the servers. A
prediction holds if its throughput is within 10 % of what was recorded, or within the spread of the
runs that differ in their seed alone, whichever is larger. Staleness is compared as histograms of
tokens (total variation, 0: the same, 1: nothing in common).

Controls, which must not hold: the same predictions with the time of one stage doubled. That of the
stage which limits a run must show; doubling one that has time to spare need not.

What it cannot say: how well costs carry over to another machine or model, or to one GPU more: all
runs share one machine of two cores, so that is what is compared. The length of responses is that of
the run that was fitted; a run that learns something else samples others.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_opd.cli.calibration import calibrate, config_of, staleness_distance
from megatron_opd.cli.simulation import simulate
from megatron_opd.sim.costs import Costs, Lengths

RUNS = Path("runs") / "schedules"
FITTED = "mc64-async-1"
CHECKED = (
    "mc64-sync-1",
    "mc64-step_off-1",
    "mc64-stream-1",
    "mc64-partial-1",
    "mc64-async_tau4-1",
    "split-two_students-1",
)
SPREAD = {"sync": "mc64-sync-{}", "async": "mc64-async-{}"}
SEEDS = (1, 2, 3)
LIMIT = 0.10
DOUBLED = ("student", "teacher", "learner")
Tree = dict[str, Any]


def measure(options: Sequence[str] = ()) -> Tree:
    """Fit, predict and compare; nothing is run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks calibration")
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="DIR")
    runs: Path = parser.parse_args(list(options)).runs
    found = calibrate(runs / FITTED)
    fitted, lengths = found.fitted.costs, found.fitted.lengths
    there = [name for name in (FITTED, *CHECKED) if (runs / name / "summary.json").exists()]
    spread = spreads(runs)
    limit = max(LIMIT, *spread.values())
    return {
        "fitted_to": FITTED,
        "costs": msgspec.to_builtins(fitted),
        "fit_errors": found.fitted.errors,
        "out_of_sample_error": found.error,
        "spread_of_seeds": spread,
        "limit": limit,
        "runs": {name: compared(runs / name, fitted, lengths, limit) for name in there},
        "controls": {
            stage: {
                name: compared(runs / name, doubled(fitted, stage), lengths, limit)["error"]
                for name in there
            }
            for stage in DOUBLED
        },
        "missing": [name for name in CHECKED if name not in there],
    }


def compared(run_dir: Path, costs: Costs, lengths: Lengths, limit: float) -> Tree:
    """Simulate a recorded run's configuration; what was recorded, what is predicted."""
    summary = json.loads((run_dir / "summary.json").read_text())
    outcome = simulate(config_of(run_dir), costs, lengths)
    recorded = summary["train_tokens_per_s"]
    assert outcome.tokens_per_s is not None
    error = outcome.tokens_per_s / recorded - 1
    return {
        "recorded_tokens_per_s": recorded,
        "predicted_tokens_per_s": outcome.tokens_per_s,
        "error": error,
        "holds": abs(error) <= limit,
        "response_tokens_mean": {
            "recorded": summary["response_tokens_mean"],
            "fitted_run": _mean_length(lengths),
        },
        "learner_idle_ratio": [summary["learner_idle_ratio"], outcome.learner_idle_ratio],
        "fleet_idle_ratio": [summary["fleet_idle_ratio"], outcome.rollout_idle_ratio],
        "staleness_distance": staleness_distance(outcome, summary["staleness_tokens_by_version"]),
    }


def spreads(runs: Path) -> dict[str, float]:
    """Return half the range of the throughput of runs that differ in their seed, over its mean."""
    found: dict[str, float] = {}
    for kind, pattern in SPREAD.items():
        files = [runs / pattern.format(seed) / "summary.json" for seed in SEEDS]
        speeds = [json.loads(f.read_text())["train_tokens_per_s"] for f in files if f.exists()]
        if len(speeds) > 1:
            found[kind] = (max(speeds) - min(speeds)) / 2 / statistics.mean(speeds)
    return found


def doubled(costs: Costs, stage: str) -> Costs:
    """Return costs in which one stage takes twice as long."""
    if stage == "learner":
        return msgspec.structs.replace(costs, learner=twice(costs.learner))
    if stage == "student":
        return msgspec.structs.replace(costs, engine=twice(costs.engine))
    return msgspec.structs.replace(
        costs, teachers={name: twice(cost) for name, cost in costs.teachers.items()}
    )


def twice(cost: msgspec.Struct) -> Any:
    """Return a record whose seconds are doubled."""
    seconds = [name for name in cost.__struct_fields__ if name.endswith("_s")]
    return msgspec.structs.replace(cost, **{name: 2 * getattr(cost, name) for name in seconds})


def _mean_length(lengths: Any) -> float:
    return statistics.mean(response for _, response in lengths.pairs)
