"""A study of many runs as one command: rows in benchmarks/results, resumable, a part at a time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.case_rows import run_commits
from harness.tree import RESULTS, is_dirty, marked_commit
from studies.grid.statistics import aggregated
from studies.grid.trials import KeptRows, Launch, Trial, run_trials


def run_rows(
    name: str,
    trials: Sequence[Trial],
    options: Sequence[str],
    *,
    launch: Launch,
    out: Path | None = None,
    rows: Path | None = None,
) -> list[dict[str, Any]]:
    """Run what is missing; the rows of what is finished, in the trials' order.

    Options: `--limit N` runs at most N of the missing trials (0: none, aggregate what there is),
    `--budget-s S` begins none after S seconds; `--dirty` records from a tree that is not clean,
    `--clean` makes the rows of such trees again.
    Rows are in benchmarks/results/NAME_rows.jsonl, run directories and logs in runs/NAME.
    """
    parser = argparse.ArgumentParser(prog=f"python -m studies {name}")
    parser.add_argument("--limit", type=int, default=None, help="run at most so many trials")
    parser.add_argument("--budget-s", type=float, default=None, help="begin no trial after it")
    parser.add_argument("--dirty", action="store_true", help="record from a tree as it is")
    parser.add_argument("--clean", action="store_true", help="make rows of such trees again")
    parsed = parser.parse_args(list(options))
    path = RESULTS / f"{name}_rows.jsonl" if rows is None else rows
    return run_trials(
        trials,
        Path("runs") / name if out is None else out,
        launch,
        rows=KeptRows(path, clean=parsed.clean),
        limit=parsed.limit,
        budget_s=parsed.budget_s,
        commit=marked_commit if parsed.dirty else None,
    )


def said(
    trials: Sequence[Trial], rows: Sequence[dict[str, Any]], noise: float = 0.0
) -> dict[str, Any]:
    """What the rows of a study say, by (setting, method). noise: what one accuracy is off by."""
    there = {row["name"] for row in rows}
    return {
        "run_commits": run_commits(rows),
        "missing": [trial.name for trial in trials if trial.name not in there],
        "dirty": [row["name"] for row in rows if is_dirty(row)],
        "entries": aggregated(rows, noise),
    }


def run_study(
    name: str,
    trials: Sequence[Trial],
    options: Sequence[str],
    *,
    launch: Launch,
    out: Path | None = None,
    rows: Path | None = None,
) -> dict[str, Any]:
    """Run what is missing; what all rows that are finished say."""
    return said(trials, run_rows(name, trials, options, launch=launch, out=out, rows=rows))
