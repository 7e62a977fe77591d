"""The record of a check: rewritten whole after every part, so that a cut loses one part at most."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "skipped", "failed", "not run"]


class PartFailed(Exception):
    """A part ran to its end and found something wrong; what it measured is kept."""

    def __init__(self, reason: str, figures: dict[str, Any]) -> None:
        super().__init__(reason)
        self.reason, self.figures = reason, figures


@dataclass(frozen=True)
class Result:
    """What came of one part.

    reason: why it is not "ok", in one line. figures: what it measured. last_lines: of its output,
    where it failed.
    """

    status: Status
    seconds: float = 0.0
    reason: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    last_lines: tuple[str, ...] = ()

    def line(self) -> str:
        """What the terminal shows."""
        why = "" if self.reason is None else f": {self.reason}"
        return f"{self.status}{why} ({self.seconds:.0f} s)"


class Record:
    """Results by part, on disk from the first one on."""

    def __init__(self, out: Path, head: dict[str, Any]) -> None:
        self._out, self._head = out, head
        self.results: dict[str, Result] = {}
        self._write()

    def add(self, part: str, result: Result) -> None:
        """Keep a part's result, and write the file anew."""
        self.results[part] = result
        self._write()

    def figures(self) -> dict[str, Any]:
        """Everything but the head. failed: the parts that did."""
        return {
            "parts": {name: asdict(result) for name, result in self.results.items()},
            "failed": [name for name, found in self.results.items() if found.status == "failed"],
        }

    def _write(self) -> None:
        """Replace the file in one step: a reader never sees half of it."""
        self._out.parent.mkdir(parents=True, exist_ok=True)
        draft = self._out.with_name(self._out.name + ".new")
        draft.write_text(json.dumps(self._head | self.figures(), indent=2) + "\n", "utf-8")
        os.replace(draft, self._out)
