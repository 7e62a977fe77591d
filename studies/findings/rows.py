"""One row a run: what a study keeps of its run directory, small enough for thousands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.run_dirs import rows_of
from studies.grid.trials import Trial, row_of_run

CURVES = (
    "reverse_kl_nats",
    "entropy_nats",
    "grad_norm",
    "reward_mean",
    "response_tokens_mean",
    "ratio_p99",
    "ratio_max",
    "importance_variance",
    "correction_variance",
    "truncated_fraction",
    "stopped_fraction",
    "sampler_k1_nats",
    "prox_k1_nats",
    "sampler_start_k1_nats",
    "sampler_start_k3_nats",
    "staleness_mean_versions",
)
SUMMARY = (
    "student_accuracy_before_pct",
    "student_accuracy_after_pct",
    "staleness_mean_versions",
    "staleness_max_versions",
    "probs_diff_max",
    "distinct_ids_per_token",
    "cache_bytes_per_token",
    "train_tokens_per_s",
    "overlap",
    "pipeline_s",
    "wall_s",
)
DIGITS = 3  # of a point of a curve

Row = dict[str, Any]


def row_of(trial: Trial, run_dir: Path, status: str) -> Row:
    """What is kept of a run that ended."""
    row = row_of_run(trial, run_dir, status, keys=SUMMARY, curves=CURVES, digits=DIGITS)
    return row | {"evaluations": evaluations(run_dir)}


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The student's evaluations: after how many updates, when, and how accurate."""
    kept = ("update", "set", "accuracy_pct", "stderr_pct", "mean_response_tokens", "time_s")
    kept += ("truncated_pct", "seconds")
    return [
        {key: each[key] for key in kept if key in each}
        for each in rows_of(run_dir / "evaluations.jsonl")
    ]
