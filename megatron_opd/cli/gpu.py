"""Finds out whether this machine has an NVIDIA GPU, without the seconds of importing torch."""

from __future__ import annotations

import pynvml


def has_gpu() -> bool:
    """Return whether the driver reports a GPU; a machine without a driver has none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    try:
        return pynvml.nvmlDeviceGetCount() > 0
    finally:
        pynvml.nvmlShutdown()
