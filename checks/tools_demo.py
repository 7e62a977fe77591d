"""The example with a calculator: what it learns, and what it does without what the tool says.

    python -m checks tools_demo > new.json && mv new.json benchmarks/results/tools_demo.json

Runs examples/tools/demo.yaml with three seeds, from a clean tree, and asks the held-out products of
the student before and after each run in two other ways: with a tool that answers with another row's
result, and without a tool. Finished runs and evaluations under runs/tools_demo_check are kept and
not made again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.run_dirs import summary_of
from harness.tree import clean_commit

DEMO, STUDENT = Path("examples/tools/demo.yaml"), Path("examples/tools/student")
OUT = Path("runs/tools_demo_check")
RECORD = "benchmarks/results/tools_demo.json"
SEEDS = (7, 8, 9)
CONTROLS = {
    "other_results": {"environment.type": "examples.tools.other_results:OtherResults"},
    "plain": {"environment": "null"},
}
LEARNS_PTS, NEEDS_PTS = 40.0, 20.0
"""Points that the student must gain with the tool, and lose without it."""
CHANCE_PCT = 2.0
"""Largest accuracy of guesses: the first digit of a result can be seen, the others hardly."""
FROM_SUMMARY = {
    "before": "student_accuracy_before_pct",
    "after": "student_accuracy_after_pct",
    "teacher": "teacher_accuracy_pct",
    "seconds": "wall_s",
}


def measure() -> dict[str, Any]:
    """All runs and their controls."""
    clean_commit()  # the record names it
    runs = {seed: run(seed) for seed in SEEDS}
    finals = [path / "checkpoints/final" for path in runs.values()]
    controls = {
        name: evaluated(name, overrides, [STUDENT, *finals]) for name, overrides in CONTROLS.items()
    }
    rows: list[dict[str, Any]] = []
    for seed, path in runs.items():
        summary = summary_of(path)
        row = {"seed": seed, **{key: summary[name] for key, name in FROM_SUMMARY.items()}}
        for name, found in controls.items():
            row[f"{name}_before"] = found[STUDENT.resolve()]
            row[f"{name}_after"] = found[(path / "checkpoints/final").resolve()]
        rows.append({key: round(value, 2) for key, value in row.items()})
    failed = [f"seed {row['seed']}: {fault}" for row in rows for fault in faults(row)]
    limits = {"learns_pts": LEARNS_PTS, "needs_pts": NEEDS_PTS, "chance_pct": CHANCE_PCT}
    return {
        "config": str(DEMO),
        "limits": limits,
        "runs": rows,
        "failed": failed,
    }


def faults(row: Mapping[str, float]) -> list[str]:
    """What a run's figures do not keep to."""
    without = max(row["other_results_before"], row["other_results_after"])
    wrong = {
        "it does not learn": row["after"] - row["before"] < LEARNS_PTS,
        "it does not need the tool": row["after"] - row["plain_after"] < NEEDS_PTS,
        "it knows results that its tool does not say": without > CHANCE_PCT,
    }
    return [what for what, so in wrong.items() if so]


def row_of(row: Mapping[str, float]) -> str:
    """A run as a row of the table in the example's README and docs/environments.md."""
    ways = ("before", "after"), ("other_results_before", "other_results_after")
    cells = [
        " -> ".join(f"{row[key]:.1f} %" for key in way)
        for way in (*ways, ("plain_before", "plain_after"))
    ]
    return f"| {row['seed']} | {row['teacher']:.1f} % | {' | '.join(cells)} |"


def run(seed: int) -> Path:
    """One run to its end."""
    run_dir = OUT / f"seed-{seed}"
    if not summary_of(run_dir):
        opd(run_dir.name, "run", str(DEMO), "--overwrite", **{"run.dir": run_dir, "run.seed": seed})
    return run_dir


def evaluated(name: str, overrides: Mapping[str, str], models: list[Path]) -> dict[Path, float]:
    """The accuracy of each model in percent."""
    out = OUT / f"{name}.json"
    opd(name, "eval", str(DEMO), "--out", str(out), "--checkpoints", *map(str, models), **overrides)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return {Path(row["checkpoint"]): row["accuracy_pct"] for row in rows}


def opd(name: str, *arguments: str, **overrides: object) -> None:
    """Run an `opd` command, its output in a log of this name."""
    OUT.mkdir(parents=True, exist_ok=True)
    sets = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    print(f"{name}: opd {arguments[0]}", file=sys.stderr, flush=True)
    log = OUT / f"{name}.log"
    with log.open("ab") as file:
        ended = subprocess.run(
            [sys.executable, "-m", "megatron_opd", *arguments, *sets],
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    if ended.returncode:
        raise SystemExit(f"{name} failed; see {log}")
