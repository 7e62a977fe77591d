"""Finds the CUDA compiler and the cache of the kernels that SGLang compiles for its servers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

VARIABLES = ("CUDA_HOME", "CUDA_PATH")
"""Name a toolkit, the first that is set."""
SYSTEM = Path("/usr/local/cuda")
HOST_COMPILERS = ("gcc", "c++")
"""What nvcc compiles a kernel's host code by, and what SGLang links it by; of one package."""
CACHE_VARIABLE, CACHE = "SGLANG_JIT_CACHE_DIR", "~/.cache/sglang/jit"
"""Where SGLang keeps what it has compiled: what the variable names, else the latter."""


def toolkit(environment: Mapping[str, str]) -> Path | None:
    """Returns the directory of the toolkit that a server of this environment compiles with.

    That of VARIABLES; else the one that is installed beside this program, as requirements/gpu.lock
    does; else the system's. None: there is no compiler in it, or none at all.
    """
    named = next((environment[name] for name in VARIABLES if environment.get(name)), None)
    places = [Path(named)] if named else [*_installed(), SYSTEM]
    return next((place for place in places if (place / "bin" / "nvcc").exists()), None)


def kept_kernels(environment: Mapping[str, str]) -> tuple[Path, int]:
    """Returns the directory of the kernels that are kept, and how many of them there are.

    There they are TARGET/KERNEL/BUILD; those of all targets and versions count.
    """
    cache = Path(environment.get(CACHE_VARIABLE) or CACHE).expanduser()
    return cache, len(list(cache.glob("*/*/*/*/*.so")))


def _installed() -> list[Path]:
    found = find_spec("nvidia")
    folders = [] if found is None else found.submodule_search_locations or []
    homes = [Path(folder) / "cu13" for folder in folders]
    # made at set-up: linkers look for the libraries there
    return [home for home in homes if (home / "lib64" / "libcudart.so").exists()]
