"""One part in a process of its own: what it finds, or the package that it needs, into a file.

    python -m checks.gpu.child PART OUT LIMIT_S [--dry]

It prints nothing of its own: its output is the part's.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from checks.gpu.record import PartFailed

# What a part starts in other processes, where its absence could not be told from a failure.
NEEDS = {"tests": ("pytest",), "step": ("megatron.core",), "run": ("megatron.core", "sglang")}
KERNELS = "sgl_kernel"  # of SGLang, without which no server starts on a GPU
OURS = ("benchmarks", "checks", "harness", "megatron_opd", "sglang_bridge", "tests")


def needs(part: str, *, dry: bool) -> tuple[str, ...]:
    """Modules that must be importable before the part is tried."""
    on_gpu = (KERNELS,) if part == "run" and not dry else ()
    return (*NEEDS.get(part, ()), *on_gpu)


def outcome(part: str, limit_s: float, *, dry: bool) -> dict[str, Any]:
    """{status, reason, figures} of a part; what it raises otherwise is its failure."""
    try:
        for package in needs(part, dry=dry):
            importlib.import_module(package)
        measure = importlib.import_module(f"checks.gpu.{part}").measure
        return {"status": "ok", "figures": measure(limit_s, dry=dry)}
    except PartFailed as error:
        return {"status": "failed", "reason": error.reason, "figures": error.figures}
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in OURS:
            raise
        return {"status": "skipped", "reason": f"needs {missing}"}


def main() -> None:
    """Entry point."""
    part, out, limit_s, *options = sys.argv[1:]
    found = outcome(part, float(limit_s), dry="--dry" in options)
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
