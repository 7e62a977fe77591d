"""One row a run: what a study keeps of its run directory, small enough for thousands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from studies.grid.trials import Trial, best_accuracy

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
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    return {
        "name": trial.name,
        "setting": trial.setting,
        "method": trial.method,
        "seed": trial.seed,
        "command": " ".join(trial.command(run_dir)[1:]),
        "status": status,
        "cause": summary.get("cause"),
        "fingerprint": trial.fingerprint,
        "updates": len(metrics),
        "summary": {key: summary.get(key) for key in SUMMARY}
        | {"student_accuracy_best_pct": best_accuracy(summary)},
        "evaluations": evaluations(run_dir),
        "curves": {key: [rounded(each.get(key)) for each in metrics] for key in CURVES},
    }


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The student's evaluations: after how many updates, when, and how accurate."""
    path = run_dir / "evaluations.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = ("update", "set", "accuracy_pct", "stderr_pct", "mean_response_tokens", "time_s")
    kept += ("truncated_pct", "seconds")
    return [{key: each[key] for key in kept if key in each} for each in map(json.loads, lines)]


def rounded(value: float | None) -> float | None:
    """The value with few digits; null stays null."""
    return None if value is None else float(f"{value:.{DIGITS}g}")
