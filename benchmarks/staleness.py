"""Delayed rollouts: GRPO, GSPO and GEPO at delays 0, 8 and 64 (GEPO Fig. 5, Table 2).

    python -m benchmarks staleness [--limit N] > benchmarks/results/staleness.json

As in GEPO sec. 4.1 the methods differ in the importance weight alone (Listing 1): one advantage
(reward minus the group's mean, Eq. 5), one reduction (mean over responses), one clip (PPO's minimum
at 0.8 and 1.2), no defensive term, CPPO-KL of 0.005 to the sampler at delays above 0 and none
online. Then single factors change, one at a time, at the largest delay.

tau batches lie scored behind the one that is trained on: once tau updates are made every batch is
tau versions old; before, all come from version 0. 45 runs, most telling first: delays 64 and 0 for
every seed, then the factors, then delay 8. Rows are kept in
benchmarks/results/staleness_rows.jsonl; stopped, the study goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.grid.study import run_study
from benchmarks.grid.trials import Launch, Trial, launch

CONFIG = Path("examples/rewards/gepo.yaml")  # model, data and optimizer; the loss is set below
SEEDS = (1, 2, 3)
METHODS = ("grpo", "gspo", "gepo")
LARGEST_DELAY, MIDDLE_DELAY = 64, 8
SIZE = {
    "run.max_steps": "96",
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
COMMON = {
    "objective.advantage": "group_mean",
    "objective.trust": "{type: clip, low: 0.2, high: 0.2}",
    "correction": "{type: importance}",
    "reduction": "{type: sequence_mean}",
}
CPPO_KL = {"objective.kl": "{coefficient: 0.005, to: sampler}"}
FACTORS = {  # what one run changes of its method at the largest delay
    "gepo_group_std": ("gepo", {"objective.advantage": "group_std"}),
    "gepo_no_clip": ("gepo", {"objective.trust": "{type: none}"}),
    "gepo_no_penalty": ("gepo", {"objective.kl": "null"}),
    "gepo_token_reduction": ("gepo", {"reduction": "{type: token_mean}"}),
    "gepo_defensive": ("gepo", {"objective.defensive": "1.0"}),
    "gspo_narrow_clip": ("gspo", {"objective.trust": "{type: clip, low: 0.03, high: 0.03}"}),
}


def trial(setting: str, name: str, method: str, delay: int, seed: int, **changed: str) -> Trial:
    """One run. changed: overrides of what all have in common."""
    held = {"schedule.type": "controlled", "schedule.max_staleness": str(delay)}
    penalty = CPPO_KL if delay > 0 else {"objective.kl": "null"}
    loss = {"objective": f"{{type: {method}}}"} | COMMON | penalty | changed
    return Trial(setting, name, seed, CONFIG, SIZE | held | loss)


def trials() -> list[Trial]:
    """The grid, in the order in which it is run."""

    def at(delay: int, seed: int) -> list[Trial]:
        return [trial(f"delay_{delay}", method, method, delay, seed) for method in METHODS]

    ends = [each for seed in SEEDS for delay in (LARGEST_DELAY, 0) for each in at(delay, seed)]
    factors = [
        trial("one_factor", name, method, LARGEST_DELAY, seed, **changed)
        for seed in SEEDS
        for name, (method, changed) in FACTORS.items()
    ]
    return [*ends, *factors, *(each for seed in SEEDS for each in at(MIDDLE_DELAY, seed))]


def measure(options: Sequence[str] = (), launch: Launch = launch, **paths: Path) -> dict[str, Any]:
    """Run what is missing; everything by (delay, method)."""
    found = run_study("staleness", trials(), options, launch=launch, **paths)
    return {"config": str(CONFIG), "size": SIZE, "common": COMMON | CPPO_KL, **found}
