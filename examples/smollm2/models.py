"""Makes the two models of this example: SmolLM2-135M-Instruct, and the same without some layers.

python -m examples.smollm2.models
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from examples.smollm2.convert import convert
from examples.smollm2.fetch import fetch
from examples.smollm2.prune import prune
from examples.smollm2.settings import BUILD, REMOVED_LAYERS


def make_models(out: Path) -> None:
    """Write `out`/teacher and `out`/student; what is there already is kept."""
    teacher = out / "teacher"
    _once(teacher, lambda made: convert(fetch(out), made))
    _once(out / "student", lambda made: prune(teacher, made, REMOVED_LAYERS))


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
