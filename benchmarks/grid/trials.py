"""One `opd run` per trial, in order. A finished trial's row is kept and never run again.

Rows are appended to a JSONL file, so that a study that was stopped goes on where it was. A trial
whose loss or gradient stopped being finite is a result (`diverged`); any other failure is tried
once more, then ends the study.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ATTEMPTS = 2  # a server can fail to start on a busy machine
DIVERGED = ("the loss is", "the gradient norm is")  # learner.NotFinite
CURVES = (
    "reward_mean",
    "entropy_nats",
    "grad_norm",
    "sampler_k1_nats",
    "sampler_k3_nats",
    "mismatch_max_abs_dp",
    "mismatch_mean_abs_dp",
    "response_tokens_mean",
    "importance_mean",
    "importance_variance",
    "effective_sample_fraction",
    "truncated_fraction",
    "stopped_fraction",
    "ratio_max",
    "staleness_mean_versions",
)
SUMMARY = (
    "student_accuracy_before_pct",
    "student_accuracy_after_pct",
    "staleness_mean_versions",
    "staleness_max_versions",
    "mismatch_max_abs_dp",
    "mismatch_mean_abs_dp",
    "routing_moved_fraction",
    "routing_compared_updates",
    "mismatch_compared_tokens",
    "mismatch_replayed_max_abs_dp",
    "mismatch_replayed_mean_abs_dp",
    "mismatch_free_max_abs_dp",
    "mismatch_free_mean_abs_dp",
    "distinct_ids_per_token",
    "cache_bytes_per_token",
    "wall_s",
)


@dataclass(frozen=True)
class Trial:
    """One run: a setting (what is done to the sampler), a method (the estimator) and a seed.

    config: the YAML file. overrides: `--set` of it, by dotted key.
    """

    setting: str
    method: str
    seed: int
    config: Path
    overrides: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        """Of its directory and row."""
        return f"{self.setting}-{self.method}-{self.seed}"

    def command(self, run_dir: Path) -> list[str]:
        """What is executed."""
        values = {"run.dir": str(run_dir), "run.seed": str(self.seed)} | self.overrides
        sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        return [sys.executable, "-m", "megatron_opd", "run", str(self.config), "--overwrite", *sets]


INTERRUPTED = "interrupted"
Launch = Callable[[list[str], Path], int]


def launch(command: list[str], log: Path) -> int:
    """Run to its end, its output in `log`; the exit status."""
    with log.open("w") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        ).returncode


def run_trials(trials: Sequence[Trial], out: Path, launch: Launch = launch) -> list[dict[str, Any]]:
    """The row of every trial, in their order; those kept in `out`/rows.jsonl are not run again."""
    out.mkdir(parents=True, exist_ok=True)
    kept = kept_rows(out)
    for number, trial in enumerate(trials, 1):
        if trial.name in kept:
            continue
        started = time.monotonic()
        row = run_trial(trial, out, launch)
        with (out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        kept[trial.name] = row
        print(
            f"{number}/{len(trials)} {trial.name}: {row['status']}, "
            f"{row['summary']['student_accuracy_after_pct']} % after, "
            f"{time.monotonic() - started:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return [kept[trial.name] for trial in trials]


def run_commits(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The commits that the rows were made at: a study that was stopped may have several."""
    return sorted({str(row["commit"]) for row in rows})


def kept_rows(out: Path) -> dict[str, dict[str, Any]]:
    """Rows of earlier calls by trial name."""
    path = out / "rows.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def run_trial(trial: Trial, out: Path, launch: Launch) -> dict[str, Any]:
    """Run it and read what it left. RuntimeError: it failed for another reason than the loss."""
    run_dir, log = out / trial.name, out / f"{trial.name}.log"
    summary, diverged = {}, False
    for attempt in range(1, ATTEMPTS + 1):
        code = launch(trial.command(run_dir), log)
        path = run_dir / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else {}
        cause = summary.get("cause") or ""
        diverged = any(text in cause for text in DIVERGED)
        if code == 0 or diverged:
            break
        if summary.get("status") == INTERRUPTED or attempt == ATTEMPTS:
            raise RuntimeError(f"{trial.name} failed: {cause or log.read_text()[-2000:]}")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    row = {
        "name": trial.name,
        "setting": trial.setting,
        "method": trial.method,
        "seed": trial.seed,
        "command": " ".join(trial.command(run_dir)[1:]),
        "status": "diverged" if diverged else "finished",
        "commit": summary.get("commit"),
        "summary": {key: summary.get(key) for key in SUMMARY},
        "curves": {key: [each.get(key) for each in rows] for key in CURVES},
    }
    shutil.rmtree(run_dir)
    return row
