"""Makes the two models of this example: SmolLM2-135M-Instruct, and the same without some layers.

python -m examples.smollm2.models
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from examples.smollm2.convert import convert
from examples.smollm2.fetch import fetch
from examples.smollm2.prune import prune
from examples.smollm2.settings import BUILD, REMOVED_LAYERS

RECORD = "removed_layers.json"
"""File of the student that lists the layers that it lacks."""


def make_models(out: Path) -> None:
    """Write `out`/teacher and `out`/student; kept if there, a student only with the same layers."""
    teacher, student = out / "teacher", out / "student"
    _once(teacher, lambda made: convert(fetch(out), made))
    removed = json.dumps(sorted(REMOVED_LAYERS))
    record = student / RECORD
    if not record.exists() or record.read_text(encoding="utf-8") != removed:
        shutil.rmtree(student, ignore_errors=True)

    def make(made: Path) -> None:
        prune(teacher, made, REMOVED_LAYERS)
        (made / RECORD).write_text(removed, encoding="utf-8")

    _once(student, make)


def _once(target: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a directory that gets its name when it is whole."""
    if target.exists():
        return
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    make(partial)
    partial.rename(target)


if __name__ == "__main__":
    make_models(BUILD)
