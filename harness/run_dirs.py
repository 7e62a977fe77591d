"""Reads what a run has left in its directory, also while it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Tree = dict[str, Any]


def summary_of(run_dir: Path) -> Tree:
    """The run's summary; {} where it left none."""
    path = run_dir / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def rows_of(file: Path) -> list[Tree]:
    """The rows of a file that has one a line, but for one that is being written; [] without it."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def updates_of(run_dir: Path) -> list[Tree]:
    """The rows of metrics.jsonl so far, one an update."""
    return rows_of(run_dir / "metrics.jsonl")
