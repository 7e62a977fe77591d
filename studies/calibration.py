"""Costs fitted to one recorded run, and what they predict of runs that they have not seen.

    python -m studies calibration > benchmarks/results/calibration.json

Makes five runs of the study of schedules again (some five minutes) and keeps their time lines.
Costs and lengths are fitted to that of schedule async; the other runs, of other schedules and of
another split of the servers, are simulated with their own configurations and these costs. A
prediction holds if its throughput is within 10 % of what was recorded, or within the spread of runs
that differ in their seed alone (of the study of schedules), whichever is larger. Staleness is
compared as histograms of tokens (total variation, 0: the same, 1: nothing in common).

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

from harness.case_rows import run_commits
from harness.run_dirs import summary_of
from harness.tree import RESULTS
from megatron_opd.sim.calibration import calibrate, config_of, staleness_distance
from megatron_opd.sim.costs import Costs, Lengths
from megatron_opd.sim.world import simulate
from studies.grid.trials import Launch, launch, run_trials
from studies.schedules import COMPARED, SEEDS, prepare, trials

RUNS = Path("runs") / "calibration"
SCHEDULES = RESULTS / "schedules_rows.jsonl"
FITTED = "mc64-async-1"
CHECKED = ("mc64-sync-1", "mc64-step_off-1", "mc64-async_tau4-1", "split-two_students-1")
LIMIT = 0.10
DOUBLED = ("student", "teacher", "learner")
Tree = dict[str, Any]


def measure(options: Sequence[str] = (), *, launch: Launch = launch, out: Path = RUNS) -> Tree:
    """Make the runs that are missing; fit, predict and compare."""
    argparse.ArgumentParser(prog="python -m studies calibration").parse_args(list(options))
    prepare()
    names = (FITTED, *CHECKED)
    made = run_trials([t for t in trials() if t.name in names], out, launch, keep=True)
    found = calibrate(out / FITTED)
    fitted, lengths = found.fitted.costs, found.fitted.lengths
    spread = spreads(SCHEDULES)
    limit = max(LIMIT, *spread.values())
    return {
        "run_commits": run_commits(made),
        "fitted_to": FITTED,
        "costs": msgspec.to_builtins(fitted),
        "fit_errors": found.fitted.errors,
        "out_of_sample_error": found.error,
        "spread_of_seeds": spread,
        "limit": limit,
        "runs": {name: compared(out / name, fitted, lengths, limit) for name in names},
        "controls": {
            stage: {
                name: compared(out / name, doubled(fitted, stage), lengths, limit)["error"]
                for name in names
            }
            for stage in DOUBLED
        },
    }


def compared(run_dir: Path, costs: Costs, lengths: Lengths, limit: float) -> Tree:
    """Simulate a recorded run's configuration; what was recorded, what is predicted."""
    summary = summary_of(run_dir)
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


def spreads(rows: Path) -> dict[str, float]:
    """Return half the range of the throughput of runs that differ in their seed, over its mean."""
    newest = {row["name"]: row for row in map(json.loads, rows.read_text().splitlines())}
    found: dict[str, float] = {}
    for kind in COMPARED:
        names = [f"mc64-{kind}-{seed}" for seed in SEEDS]
        speeds = [newest[name]["summary"]["train_tokens_per_s"] for name in names]
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
