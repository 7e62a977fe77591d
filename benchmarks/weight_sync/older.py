"""An older commit of the project beside this one, to measure what it did."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

from harness.tree import ROOT

COPIED = ("benchmarks", "harness")


class NoCommit(ValueError):
    """A commit that this checkout does not have."""


def full_commit(commit: str) -> str:
    """The commit's whole name. NoCommit: the checkout does not have it, or is none."""
    asked = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    try:
        found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise NoCommit(f"--before {commit}: git cannot be run: {error}") from None
    if found.returncode:
        raise NoCommit(f"--before {commit}: this checkout has no such commit; name one it has")
    return found.stdout.strip()


def check_out(commit: str, path: Path) -> Path:
    """Write the commit's files to `path`, with this benchmark in place of its own; returns `path`.

    Nothing of it is written into the checkout's own .git, so nothing is left there by a run that is
    killed.
    """
    made = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(path, filter="data")
    ignore = shutil.ignore_patterns("results", "__pycache__")
    for folder in COPIED:
        shutil.rmtree(path / folder, ignore_errors=True)
        shutil.copytree(ROOT / folder, path / folder, ignore=ignore)
    return path
