"""A library that answers like NVIDIA's driver on a machine without a device.

GPU libraries of the environment ask the loader for libcuda.so.1 as they are imported, and most
want every function that they name at once. This one has all functions that the lock's own cuda.h
names; each returns CUDA_ERROR_NO_DEVICE.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

NO_DEVICE = 100
LIBRARY = "libcuda.so.1"
COMPILER = "g++"
# types begin with CU, the runtime's functions with cuda
FUNCTION = re.compile(r"\bcu[A-Z]\w*")


def functions(header: Path) -> list[str]:
    """Names of the driver's functions in a cuda.h, those of single versions included."""
    return sorted(set(FUNCTION.findall(header.read_text(encoding="utf-8"))))


def source(names: list[str]) -> str:
    """C code of the library."""
    return "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names)


def build(folder: Path, header: Path) -> Path:
    """Compile the library into `folder`; returns its path."""
    code, library = folder / "driver.c", folder / LIBRARY
    code.write_text(source(functions(header)), encoding="utf-8")
    command = [COMPILER, "-x", "c", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([*command, str(code), "-o", str(library)], check=True)
    return library
