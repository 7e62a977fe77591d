"""Which commit the code of a run is of: a study records from a clean tree."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
"""Where records are kept, of checks, studies and benchmarks alike."""
MARK = "-dirty"
"""Ends the commit of a row whose tree differed from it."""


class DirtyTree(RuntimeError):
    """Reports in one line that tracked files differ from the commit that a row would name."""


def clean_commit() -> str:
    """Return the commit of this checkout. DirtyTree: its files differ.

    Rows that a study is writing do not count.
    """
    found = marked_commit()
    if found.endswith(MARK):
        raise DirtyTree(
            "a study records runs of a commit, but tracked files outside benchmarks/results differ "
            "from it: commit or stash them, or add --dirty, which marks the rows"
        )
    return found


def marked_commit() -> str:
    """Return the commit of this checkout, with "-dirty" where its files differ."""
    differing = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"
    )
    return _git("rev-parse", "HEAD") + (MARK if differing else "")


def is_dirty(row: Mapping[str, Any]) -> bool:
    """Tell whether a row is of a tree that differed from the commit that it names."""
    return str(row["commit"]).endswith(MARK)


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.strip()
