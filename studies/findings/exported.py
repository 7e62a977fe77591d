"""Evaluates the checkpoint that a run exports: the learner's own weights.

During a run it is the servers that answer, with rounded weights where a study rounds them: an
estimator that trains the rounded student would win by that measure alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

KEY = "learner_accuracy_after_pct"
"""Name of the figure in a row's summary."""


def exported_by(run_dir: Path) -> Path | None:
    """The run's exported checkpoint; null where it exports none."""
    final = run_dir / "checkpoints" / "final"
    return final if final.exists() else None


def command(config: Path, exported: Path, out: Path) -> list[str]:
    """What evaluates it, on the problems of `config`, and writes `out`."""
    words = ["eval", str(config), "--checkpoints", str(exported), "--out", str(out)]
    return [sys.executable, "-m", "megatron_opd", *words]


def accuracy_pct(out: Path) -> float:
    """The accuracy that was written."""
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return float(row["accuracy_pct"])
