"""Finds the CUDA compiler that SGLang compiles kernels with when a server first starts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

VARIABLES = ("CUDA_HOME", "CUDA_PATH")
"""Name a toolkit, the first that is set."""
SYSTEM = Path("/usr/local/cuda")


def toolkit(environment: Mapping[str, str]) -> Path | None:
    """Returns the directory of the toolkit that a server of this environment compiles with.

    That of VARIABLES; else the one that is installed beside this program, as requirements/gpu.lock
    does; else the system's. None: there is no compiler in it, or none at all.
    """
    named = next((environment[name] for name in VARIABLES if environment.get(name)), None)
    places = [Path(named)] if named else [*_installed(), SYSTEM]
    return next((place for place in places if (place / "bin" / "nvcc").exists()), None)


def _installed() -> list[Path]:
    found = find_spec("nvidia")
    folders = [] if found is None else found.submodule_search_locations or []
    homes = [Path(folder) / "cu13" for folder in folders]
    # made at set-up: linkers look for the libraries there
    return [home for home in homes if (home / "lib64" / "libcudart.so").exists()]
