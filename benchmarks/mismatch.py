"""Learner-sampler mismatch: rollouts from rounded weights, by correction (TIS Fig. 2-6).

    python -m benchmarks mismatch

GRPO on the arithmetic task, two optimizer steps a batch. int8 and fp8: the student servers sample
from weight matrices rounded to that format; exact: the reference. Held-out accuracies after
training are of what the servers hold, rounded weights included. Every run's row is kept in
runs/mismatch/rows.jsonl: stopped, the study goes on where it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.grid.statistics import aggregated
from benchmarks.grid.trials import Launch, Trial, launch, run_commits, run_trials

CONFIG = Path("examples/rewards/grpo.yaml")
OUT = Path("runs/mismatch")
SEEDS = (1, 2, 3)
SETTINGS = {"exact": "null", "int8": "int8", "fp8": "fp8"}
METHODS = {
    "none": "{type: none, prox: true}",
    "vanilla_is": "{type: importance, prox: true}",
    "tis_2": "{type: truncated, max_ratio: 2.0, prox: true}",
    "ppo_is": "{type: importance}",
}
REFERENCE = "none"  # without rounding every method is nearly the same: one is run
SIZE = {
    "run.updates": "48",
    "evaluation.problems": "64",
    "evaluation.samples": "2",
    "learner.mini_batches": "2",
    "checkpoint.export_hf": "false",
    "student.base_port": "21700",  # below the range from which the system hands out ports
    "student.startup_timeout_s": "180",
    "metrics": "{tensorboard: false, trace: false, progress: false}",
}


def trials() -> list[Trial]:
    """The grid; every method of a seed before the next seed, so that a part of it is of use."""
    return [
        Trial(
            setting,
            method,
            seed,
            CONFIG,
            SIZE | {"weight_sync.round_to": round_to, "correction": correction},
        )
        for seed in SEEDS
        for setting, round_to in SETTINGS.items()
        for method, correction in METHODS.items()
        if setting != "exact" or method == REFERENCE
    ]


def measure(out: Path = OUT, launch: Launch = launch) -> dict[str, Any]:
    """Run what is missing; everything by (setting, method)."""
    rows = run_trials(trials(), out, launch)
    return {
        "config": str(CONFIG),
        "size": SIZE,
        "run_commits": run_commits(rows),
        "entries": aggregated(rows),
    }
