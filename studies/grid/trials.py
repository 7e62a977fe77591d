"""One `opd run` per trial, in order. A row is written when its run ends and never made again.

Rows are appended to a JSONL file, so that a study that was stopped goes on where it was. A row
counts as finished only for the behaviour that made it (studies/grid/behaviour.py):
after a change of that the trial is run again and its newest row is taken. The rest of the
pipeline may change while a study goes on: tests hold it to equal updates, and each row names its
commit. A trial whose loss or gradient stopped being finite is a result (`diverged`); any other
failure is tried once more, then ends the study.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.case_rows import append_row, kept_rows, say
from harness.header import machine
from harness.run_dirs import summary_of, updates_of
from harness.tree import clean_commit
from studies.grid.behaviour import behaviour

Tree = dict[str, Any]
DIGITS = 4  # of a recorded curve
ATTEMPTS = 2  # a server can fail to start on a busy machine
DIVERGED = ("the loss is", "the gradient norm is")  # learner.NotFinite
CURVES = (
    "reward_mean",
    "entropy_nats",
    "grad_norm",
    "sampler_k1_nats",
    "sampler_k3_nats",
    "probs_diff_max",
    "probs_diff_mean",
    "response_tokens_mean",
    "sampler_start_k1_nats",
    "sampler_start_k3_nats",
    "importance_mean",
    "importance_variance",
    "correction_mean",
    "correction_variance",
    "trust_ratio_mean",
    "trust_ratio_variance",
    "effective_sample_fraction",
    "advantage_error",
    "truncated_fraction",
    "stopped_fraction",
    "ratio_max",
    "staleness_mean_versions",
)
PIPELINE = (
    "train_tokens_per_s",
    "overlap",
    "learner_idle_ratio",
    "fleet_idle_ratio",
    "pipeline_s",
    "rollout_s_mean",
    "train_s_mean",
    "publish_s_mean",
    "pause_s_mean",
    "response_tokens_mean",
    "partial_rollouts",
    "rollouts_restarted",
    "staleness_bound_versions",
)
"""What says how well the stages of a run overlap; rows of older studies lack it."""
SUMMARY = (
    *PIPELINE,
    "student_accuracy_before_pct",
    "student_accuracy_after_pct",
    "staleness_mean_versions",
    "staleness_max_versions",
    "probs_diff_max",
    "probs_diff_mean",
    "routing_moved_fraction",
    "routing_compared_updates",
    "mismatch_compared_tokens",
    "probs_diff_replayed_max",
    "probs_diff_replayed_mean",
    "probs_diff_free_max",
    "probs_diff_free_mean",
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
        """Names its directory and its row."""
        return f"{self.setting}-{self.method}-{self.seed}"

    def command(self, run_dir: Path) -> list[str]:
        """What is executed."""
        values = {"run.dir": str(run_dir), "run.seed": str(self.seed)} | self.overrides
        sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        return [sys.executable, "-m", "megatron_opd", "run", str(self.config), "--overwrite", *sets]

    @cached_property
    def fingerprint(self) -> str:
        """Changes with what decides the run's figures, see studies/grid/behaviour.py."""
        return behaviour(self.config, {"run.seed": str(self.seed)} | self.overrides)


@dataclass(frozen=True)
class KeptRows:
    """Where rows are kept. clean: those of trees that differed from their commit do not count."""

    path: Path
    clean: bool = False


INTERRUPTED = "interrupted"
Launch = Callable[[list[str], Path], int]


def launch(command: list[str], log: Path) -> int:
    """Run to its end, its output in `log`; the exit status."""
    with log.open("w") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        ).returncode


def run_trials(
    trials: Sequence[Trial],
    out: Path,
    launch: Launch = launch,
    *,
    rows: KeptRows | None = None,
    limit: int | None = None,
    budget_s: float | None = None,
    keep: bool = False,
    commit: Callable[[], str] | None = None,
) -> list[Tree]:
    """The rows of the trials that are finished, in the trials' order.

    out: run directories and logs. rows: the JSONL file of rows, by default `out`/rows.jsonl.
    limit: how many trials may be run now; null: all that are missing. budget_s: none begins after
    so many seconds. keep: leave the run directories; a trial whose directory is not there is made
    again. commit: of the code, asked before each run; clean_commit unless one is given.
    """
    commit = commit or clean_commit
    out.mkdir(parents=True, exist_ok=True)
    rows = rows or KeptRows(out / "rows.jsonl")
    kept = finished_rows(trials, rows)
    if keep:
        kept = {name: row for name, row in kept.items() if (out / name).is_dir()}
    missing = [trial for trial in trials if trial.name not in kept]
    began = time.monotonic()
    for trial in missing[:limit]:
        started = time.monotonic()
        if budget_s is not None and started - began >= budget_s:
            break
        of_commit = commit()
        row = run_trial(trial, out, launch) | {"commit": of_commit, "cpu": machine()["cpu"]}
        if not keep:
            shutil.rmtree(out / trial.name)
        append_row(rows.path, row)
        kept[trial.name] = row
        say_ended(row, f"{len(kept)}/{len(trials)}", time.monotonic() - started)
    return [kept[trial.name] for trial in trials if trial.name in kept]


def say_ended(row: Tree, how_far: str, seconds: float) -> None:
    """Tell whoever watches how a run ended."""
    accuracy = row["summary"]["student_accuracy_after_pct"]
    say(f"{how_far} {row['name']}: {row['status']}, {accuracy} % after, {seconds:.0f} s")


def finished_rows(trials: Sequence[Trial], rows: KeptRows) -> dict[str, Tree]:
    """The newest row of every trial that today's behaviour made, by name, in the trials' order."""
    prints = {trial.name: trial.fingerprint for trial in trials}
    return kept_rows(rows.path, prints, clean=rows.clean)


def run_trial(trial: Trial, out: Path, launch: Launch) -> Tree:
    """Run it and read what it left. RuntimeError: it failed for another reason than the loss."""
    run_dir, log = out / trial.name, out / f"{trial.name}.log"
    attempts = 0
    while True:
        attempts += 1
        code = launch(trial.command(run_dir), log)
        summary = summary_of(run_dir)
        if status := status_of(summary, code):
            return row_of_run(trial, run_dir, status)
        if summary.get("status") == INTERRUPTED or attempts == ATTEMPTS:
            cause = summary.get("cause") or log.read_text()[-2000:]
            raise RuntimeError(f"{trial.name} failed: {cause}")


def status_of(summary: Tree, code: int) -> str | None:
    """How a run ended: finished, or diverged; null where it failed for another reason."""
    if any(text in (summary.get("cause") or "") for text in DIVERGED):
        return "diverged"
    return None if code else "finished"


def row_of_run(
    trial: Trial,
    run_dir: Path,
    status: str,
    *,
    keys: Sequence[str] = SUMMARY,
    curves: Sequence[str] = CURVES,
    digits: int = DIGITS,
) -> Tree:
    """What is kept of a run that ended. keys: of its summary. digits: of a point of a curve."""
    summary = summary_of(run_dir)
    updates = updates_of(run_dir)
    return {
        "name": trial.name,
        "setting": trial.setting,
        "method": trial.method,
        "seed": trial.seed,
        "command": " ".join(trial.command(run_dir)[1:]),
        "status": status,
        "cause": summary.get("cause"),
        "fingerprint": trial.fingerprint,
        "updates": len(updates),
        "summary": {key: summary.get(key) for key in keys}
        | {"student_accuracy_best_pct": best_accuracy(summary)},
        "curves": {key: [rounded(each.get(key), digits) for each in updates] for key in curves},
    }


def best_accuracy(summary: Tree) -> float | None:
    """That of the best evaluation of the run's first set; null without evaluations."""
    for picked in (summary.get("evaluation_sets") or {}).values():
        if picked["best"] is not None:
            return picked["best"]["accuracy_pct"]
    return None


def rounded(value: float | None, digits: int) -> float | None:
    """The value with few digits; null stays null."""
    return None if value is None else float(f"{value:.{digits}g}")
