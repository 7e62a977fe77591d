"""Makes recorded runs again: a deterministic run must come out the same, figure for figure."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.header import machine
from harness.tree import marked_commit
from studies.findings import wall_clock
from studies.findings.pool import run_missing
from studies.findings.rows import Row
from studies.grid.trials import Trial

COMPARED = ("status", "updates")
OF_SUMMARY = ("student_accuracy_after_pct", "probs_diff_max", "distinct_ids_per_token")


def chosen(trials: Sequence[Trial], kept: Mapping[str, Row], count: int, seed: int) -> list[Trial]:
    """Some trials, drawn at random, of those that have a row and do not depend on the clock.

    Bits depend on the kind of processor: rows of another one, or that do not name it, are left out.
    """
    here = machine()["cpu"]
    kept = {name: row for name, row in kept.items() if row.get("cpu") == here}
    there = [t for t in trials if t.name in kept and t.setting != wall_clock.SETTING]
    return random.Random(seed).sample(there, min(count, len(there)))


def made_again(trials: Sequence[Trial], kept: Mapping[str, Row], jobs: int) -> dict[str, Any]:
    """Run these trials anew; by name, what differs from their rows. Nothing is kept."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        found = run_missing(
            trials,
            path / "rows.jsonl",
            path / "runs",
            jobs=jobs,
            budget_s=1e9,
            commit=marked_commit,
        )
    differing = {name: differences(kept[name], row) for name, row in sorted(found.items())}
    return {"again": differing, "failed": any(differing.values())}


def differences(one: Row, other: Row) -> list[str]:
    """Names what differs between two rows of a run, of all that does not measure time."""
    found = [key for key in COMPARED if one[key] != other[key]]
    curves: Mapping[str, Any] = one["curves"]
    found += [key for key in curves if curves[key] != other["curves"].get(key)]
    return found + [key for key in OF_SUMMARY if one["summary"][key] != other["summary"][key]]
