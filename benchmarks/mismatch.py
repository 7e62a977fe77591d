"""Learner-sampler mismatch: rollouts from rounded weights, by correction (TIS Fig. 2-6).

    python -m benchmarks mismatch [--limit N] > benchmarks/results/mismatch.json

GRPO on the arithmetic task at staleness 0 with two optimizer steps a batch. The student servers
sample from weight matrices rounded to fp8 or int8, or from the exact ones: every correction runs on
the exact sampler too, as the control. The applied weight is the correction (sampler's gap at the
batch's start) times the trust ratio (the student's own second step); both are recorded apart, since
the second is there without any rounding. ppo_is has one ratio, learner now over sampler, which the
clip acts on: it counts as the trust ratio. Held-out accuracies after training are of what the
servers hold, rounded weights included.

36 runs, most telling first: all corrections on exact and fp8 for one seed, then the other seeds,
then int8 for the two ends of the scale. Rows are kept in benchmarks/results/mismatch_rows.jsonl;
stopped, the study goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.grid.study import run_study
from benchmarks.grid.trials import Launch, Trial, launch

CONFIG = Path("examples/rewards/grpo.yaml")
SEEDS = (1, 2, 3)
ROUNDING = {"exact": "null", "fp8": "fp8", "int8": "int8"}
METHODS = {
    "none": "{type: none, prox: true}",
    "vanilla_is": "{type: importance, prox: true}",
    "tis_2": "{type: truncated, max_ratio: 2.0, prox: true}",
    "tis_8": "{type: truncated, max_ratio: 8.0, prox: true}",
    "ppo_is": "{type: importance}",
}
INT8_METHODS = ("none", "tis_2")
SIZE = {
    "run.max_steps": "48",
    "schedule.type": "sync",
    "evaluation.problems": "64",
    "evaluation.samples": "2",
    "learner.num_mini_batches": "2",
    "checkpoint.export_hf": "false",
    "student.base_port": "21700",  # below the range from which the system hands out ports
    "student.startup_timeout_s": "180",
    "metrics": "{tensorboard: false, trace: false, progress: false}",
}


def trial(sampler: str, method: str, seed: int) -> Trial:
    """One run."""
    changed = {"weight_sync.round_to": ROUNDING[sampler], "correction": METHODS[method]}
    return Trial(sampler, method, seed, CONFIG, SIZE | changed)


def trials() -> list[Trial]:
    """The grid, in the order in which it is run."""
    both = [
        trial(s, method, seed) for seed in SEEDS for s in ("exact", "fp8") for method in METHODS
    ]
    return both + [trial("int8", method, seed) for seed in SEEDS for method in INT8_METHODS]


def measure(options: Sequence[str] = (), launch: Launch = launch, **paths: Path) -> dict[str, Any]:
    """Run what is missing; everything by (sampler, correction)."""
    found = run_study("mismatch", trials(), options, launch=launch, **paths)
    return {"config": str(CONFIG), "size": SIZE, "methods": METHODS, **found}
