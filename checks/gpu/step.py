"""One training step of a dense model and of one with experts: `python -m benchmarks step`."""

from __future__ import annotations

from typing import Any

from benchmarks.step import measure as measure_step
from checks.gpu.record import PartFailed

END_S = 10.0  # for what comes after the last case


def measure(limit_s: float, *, dry: bool) -> dict[str, Any]:
    """Figures of every case that there was time for. Raises PartFailed when one fails."""
    options = ["--budget-s", str(max(1.0, limit_s - END_S)), "--variants", "1"]
    figures = measure_step([*options, "--size", "tiny"] if dry else options)
    failed = [f"{case['model']}: {case['error']}" for case in figures["cases"] if "error" in case]
    if failed:
        raise PartFailed("; ".join(failed), figures)
    return figures
