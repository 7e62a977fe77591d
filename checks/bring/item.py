"""Defines an item, and reads what its run left."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.run_dirs import rows_of, summary_of

Tree = dict[str, Any]


@dataclass(frozen=True)
class Ran:
    """Holds the directory of an item whose run has finished."""

    folder: Path

    @cached_property
    def summary(self) -> Tree:
        """Returns the run's summary.json."""
        return summary_of(self.folder / "run")

    @cached_property
    def rollouts(self) -> list[Tree]:
        """Returns every sample that was trained on or dropped, in order."""
        return rows_of(self.folder / "run" / "rollouts.jsonl")


@dataclass(frozen=True, slots=True)
class Item:
    """Describes one thing that a user brings.

    what: in words. prepare: writes its files into a directory and returns the configuration. show:
    returns what the run showed, and `as_asked`.
    """

    name: str
    what: str
    prepare: Callable[[Path], Tree]
    show: Callable[[Ran], Tree]


def write_jsonl(path: Path, rows: list[Tree]) -> str:
    """Write rows, and return the path as text."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def response_of(row: Tree) -> str:
    """Return the text of a recorded response."""
    return "".join(row["tokens"])
