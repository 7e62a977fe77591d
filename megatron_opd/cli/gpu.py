"""Whether this machine has an NVIDIA GPU, without the seconds that importing torch takes."""

from __future__ import annotations

import pynvml


def has_gpu() -> bool:
    """Asks the driver; a machine without one has no GPU."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    try:
        return pynvml.nvmlDeviceGetCount() > 0
    finally:
        pynvml.nvmlShutdown()
