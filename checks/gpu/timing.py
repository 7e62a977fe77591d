"""Seconds and memory of a call on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def timed(call: Callable[[], object], device: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of `repeats` calls after a first one that does not count, and peak extra MiB.

    The peak is of the tensors that torch allocates besides those that exist; null on a CPU.
    """
    cuda = device == "cuda"
    times_ms: list[float] = []
    peak_mib: float | None = None
    for _ in range(1 + repeats):
        before = 0
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
            peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        times_ms.append(1e3 * (time.perf_counter() - started))
    return {
        "ms_median": statistics.median(times_ms[1:]),
        "ms_least": min(times_ms[1:]),
        "peak_extra_mib": peak_mib,
    }


def or_out_of_memory(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Its figures, or {error} where the GPU's memory does not hold it."""
    try:
        return measure()
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return {"error": f"out of memory: {str(error).splitlines()[0]}"}
