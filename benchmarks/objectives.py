"""Every objective and support on the demo: 20 updates each, before and after.

    python -m benchmarks objectives

Distillation objectives are the demo's file with one or two `--set`; the three from rewards are the
files in examples/rewards. Rows are kept in runs/objectives/rows.jsonl: stopped, it goes on where it
was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.grid.trials import Launch, Trial, launch, run_commits, run_trials

DEMO, REWARDS = Path("examples/arithmetic/demo.yaml"), Path("examples/rewards")
OUT = Path("runs/objectives")
SEED = 7
ONE_SET = {
    "reverse_kl": ("objective", "{type: reverse_kl}"),
    "sparse_reverse_kl": ("objective", "{type: sparse_reverse_kl}"),
    "sparse_reverse_kl_bucket": ("objective", "{type: sparse_reverse_kl, outside: bucket}"),
    "forward_kl": ("objective", "{type: forward_kl}"),
    "jsd": ("objective", "{type: jsd}"),
    "skew_forward_kl": ("objective", "{type: skew_forward_kl}"),
    "skew_reverse_kl": ("objective", "{type: skew_reverse_kl}"),
    "mc_1": ("support", "{type: mc, m: 1}"),
    "path": ("support", "{type: path}"),
    "topk_reweighted": ("support", "{type: topk, k: 16}"),
    "atoms_tail": ("support", "{type: atoms_tail}"),
    "atoms_tail_thin": ("support", "{type: atoms_tail, thin: true}"),
    "exact": ("support", "{type: exact}"),
    "tis_2": ("correction", "{type: truncated, max_ratio: 2.0}"),
}
TEACHER_OWNED = {
    "forward_kl_teacher_topk": "{type: teacher_topk, k: 16}",
    "forward_kl_teacher_mc": "{type: teacher_mc, m: 16}",
}
TOPK_RENORMALISED = {
    "support": "{type: topk, k: 16}",
    "objective": "{type: reverse_kl, outside: renormalise}",
}
FROM_REWARDS = ("grpo", "gspo", "gepo")
SIZE = {
    "run.max_steps": "20",
    "evaluation.problems": "128",
    "evaluation.samples": "4",
    "checkpoint.export_hf": "false",
    "metrics": "{tensorboard: false, trace: false, progress: false}",
}
REPORTED = (
    "student_accuracy_before_pct",
    "student_accuracy_after_pct",
    "distinct_ids_per_token",
    "cache_bytes_per_token",
    "probs_diff_max",
    "wall_s",
)


def trials() -> list[Trial]:
    """One run each, the same seed."""
    single = [
        Trial("demo", name, SEED, DEMO, SIZE | {key: value})
        for name, (key, value) in ONE_SET.items()
    ]
    scored = [
        Trial("demo", name, SEED, DEMO, SIZE | {"objective": "{type: forward_kl}"} | {"support": s})
        for name, s in TEACHER_OWNED.items()
    ]
    renormalised = Trial("demo", "topk_renormalised", SEED, DEMO, SIZE | TOPK_RENORMALISED)
    rewarded = [
        Trial("rewards", name, SEED, REWARDS / f"{name}.yaml", SIZE) for name in FROM_REWARDS
    ]
    return [*single, renormalised, *scored, *rewarded]


def measure(out: Path = OUT, launch: Launch = launch) -> dict[str, Any]:
    """Run what is missing; one entry a run."""
    rows = run_trials(trials(), out, launch)
    return {
        "size": SIZE,
        "run_commits": run_commits(rows),
        "entries": [
            {"name": row["method"], "command": row["command"], "status": row["status"]}
            | {key: row["summary"].get(key) for key in REPORTED}
            for row in rows
        ],
    }
