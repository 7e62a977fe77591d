"""Makes the environment that TRL runs in: packages of requirements.lock, from where pip looks."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tools.setup_venv import cpu_torch, create, pinned, read_sources

LOCK = Path(__file__).with_name("requirements.lock")
VENV = Path("build/beside_trl/venv")
STAMP = "pins.sha256"


def trl_python() -> str:
    """Return the interpreter of TRL's environment, which is made unless it has these pins.

    Raises subprocess.CalledProcessError, or tools.setup_venv.SetupError: a package is not found.
    """
    python, stamp = str(VENV.absolute() / "bin" / "python"), VENV / STAMP
    digest = hashlib.sha256(sys.version.encode() + LOCK.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return python
    create(VENV)
    sources = read_sources(sys.executable)
    # uv of this project's environment: the lock file has none
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--python", python]
    uv += ["--quiet", *sources.uv_options()]
    version = pinned(LOCK, "torch")
    assert version is not None
    os.environ.update(sources.environment())
    subprocess.run([*uv, "--no-deps", "-r", str(LOCK), *cpu_torch(uv, version)], check=True)
    stamp.write_text(digest, encoding="utf-8")
    return python
