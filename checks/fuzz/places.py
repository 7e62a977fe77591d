"""Files that targets read: one scratch directory a process, and copies of the smallest models."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from harness.tree import ROOT

EXAMPLE = ROOT / "examples" / "arithmetic"


@cache
def scratch() -> Path:
    """A directory that goes with the process."""
    path = Path(tempfile.mkdtemp(prefix="opd-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def written(name: str, data: bytes) -> Path:
    """`data` in the scratch file `name`."""
    path = scratch() / name
    path.write_bytes(data)
    return path


def example_json(name: str) -> Any:
    """A JSON file of the example student."""
    return json.loads((EXAMPLE / "student" / name).read_text())


def student_with(name: str, data: bytes) -> Path:
    """The example student, its file `name` holding `data`."""
    path = scratch() / "model"
    if not path.exists():
        shutil.copytree(EXAMPLE / "student", path)
    for file in path.iterdir():
        if not (EXAMPLE / "student" / file.name).exists():
            file.unlink()
    for file in (EXAMPLE / "student").iterdir():
        if file.name != "model.safetensors":
            shutil.copyfile(file, path / file.name)
    if name == "model.safetensors" or (path / "damaged").exists():
        shutil.copyfile(EXAMPLE / "student" / "model.safetensors", path / "model.safetensors")
    (path / name).write_bytes(data)
    return path
