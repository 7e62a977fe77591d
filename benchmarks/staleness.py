"""Delayed rollouts: GRPO, GSPO and GEPO at staleness 0, 8 and 64 (GEPO Fig. 5, Table 2).

    python -m benchmarks staleness

tau batches lie scored behind the one that is trained on: once tau updates are made every batch is
tau versions old; before, all come from version 0. Every run's row is kept in
runs/staleness/rows.jsonl: stopped, the study goes on where it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.grid.statistics import aggregated
from benchmarks.grid.trials import Launch, Trial, launch, run_commits, run_trials

CONFIGS = {name: Path(f"examples/rewards/{name}.yaml") for name in ("grpo", "gspo", "gepo")}
OUT = Path("runs/staleness")
SEEDS = (1, 2, 3)
STALENESSES = (0, 8, 64)
SIZE = {
    "run.updates": "96",
    "buffer.batch_size": "32",
    # at the examples' 2e-4, 64 updates on what version 0 sampled leave no student to compare
    "learner.optimizer.lr": "5.0e-5",
    "evaluation.problems": "64",
    "evaluation.samples": "2",
    "checkpoint.export_hf": "false",
    "student.base_port": "21800",  # below the range from which the system hands out ports
    "student.startup_timeout_s": "180",
    "metrics": "{tensorboard: false, trace: false, progress: false}",
}
# The ratio of GEPO Eq. 6: learner now over sampler, one optimizer step a batch.
METHODS = {
    "grpo": {"correction": "{type: importance}", "learner.mini_batches": "1"},
    "gspo": {},
    "gepo": {},
}


def trials() -> list[Trial]:
    """The grid; every method of a seed before the next seed, so that a part of it is of use."""
    return [
        Trial(
            f"staleness_{tau}",
            method,
            seed,
            CONFIGS[method],
            SIZE | {"buffer.max_staleness": str(tau), "buffer.hold_batches": str(tau)} | overrides,
        )
        for seed in SEEDS
        for tau in STALENESSES
        for method, overrides in METHODS.items()
    ]


def measure(out: Path = OUT, launch: Launch = launch) -> dict[str, Any]:
    """Run what is missing; everything by (setting, method)."""
    rows = run_trials(trials(), out, launch)
    return {
        "configs": {name: str(path) for name, path in CONFIGS.items()},
        "size": SIZE,
        "run_commits": run_commits(rows),
        "entries": aggregated(rows),
    }
