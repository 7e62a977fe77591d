"""What routing replay is worth: samplers that round differently, with replay and without.

    python -m studies routing

The demo's mixture-of-experts student. Every update is trained with the fleet's routing and also
measured with the learner's own: |p_learner - p_sampler| over the same tokens. float32: the control;
bfloat16: servers of that type; int8, fp8: servers whose weight matrices are rounded to that format,
from the first weight sync on. At staleness 0 no rollout spans two versions; at 1 many do. Rows are
kept in runs/routing/rows.jsonl: stopped, the study goes on where it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.case_rows import run_commits
from studies.grid.trials import Launch, Trial, launch, run_trials

CONFIG = Path("examples/arithmetic/demo.yaml")
OUT = Path("runs/routing")
SEED = 7
STALENESSES = (0, 1)
SAMPLERS = {
    "float32": {},
    "bfloat16": {"student.dtype": "bfloat16"},
    "int8": {"weight_sync.round_to": "int8"},
    "fp8": {"weight_sync.round_to": "fp8"},
}
SIZE = {
    "run.max_steps": "20",
    "learner.routing_replay": "rollout",
    "learner.routing_compare_every": "1",
    "evaluation.problems": "0",
    "checkpoint.export_hf": "false",
    "student.startup_timeout_s": "300",
    "metrics": "{tensorboard: false, trace: false, progress: false}",
}
REPORTED = (
    "routing_moved_fraction",
    "routing_compared_updates",
    "mismatch_compared_tokens",
    "probs_diff_replayed_mean",
    "probs_diff_free_mean",
    "probs_diff_replayed_max",
    "probs_diff_free_max",
)


def trials() -> list[Trial]:
    """One run for every sampler and staleness, the same seed."""
    return [
        Trial(
            sampler,
            f"staleness_{tau}",
            SEED,
            CONFIG,
            SIZE | {"schedule.max_staleness": str(tau)} | overrides,
        )
        for tau in STALENESSES
        for sampler, overrides in SAMPLERS.items()
    ]


def entry(row: dict[str, Any]) -> dict[str, Any]:
    """What one run says. free_over_replayed_*: above 1, replay brings the learner closer."""
    figures = {key: row["summary"].get(key) for key in REPORTED}
    ratios = {
        f"free_over_replayed_{kind}": _ratio(
            figures[f"probs_diff_free_{kind}"], figures[f"probs_diff_replayed_{kind}"]
        )
        for kind in ("mean", "max")
    }
    return {
        "sampler": row["setting"],
        "staleness": row["method"],
        "command": row["command"],
        "status": row["status"],
        **figures,
        **ratios,
    }


def _ratio(free: float | None, replayed: float | None) -> float | None:
    return free / replayed if free is not None and replayed else None


def measure(out: Path = OUT, launch: Launch = launch) -> dict[str, Any]:
    """Run what is missing; one entry a run."""
    rows = run_trials(trials(), out, launch)
    return {
        "config": str(CONFIG),
        "size": SIZE,
        "run_commits": run_commits(rows),
        "entries": [entry(row) for row in rows],
    }
