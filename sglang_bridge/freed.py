"""Makes glibc give the memory of freed tensors back, on machines whose tensors are in host memory.

glibc takes large blocks from the system one by one and returns each when it is freed. What counts
as large begins at 128 KiB, but rises to the size of every such block that is freed, up to 32 MiB.
Blocks below stay with the process; torch aligns them, for which glibc asks for a little more than
it frees, so that a hole left by a tensor is too small for the next tensor of that size. A learner
of 127 M parameters kept 1.4 GB of holes so, beside 0.7 GB of activations. Returning blocks costs
page faults: a sixth of that learner's processor time.
"""

from __future__ import annotations

import ctypes
import os

THRESHOLD_BYTES = 2**17
"""Size from which a block is returned when it is freed: what glibc begins with, kept."""
VARIABLE = "MALLOC_MMAP_THRESHOLD_"
TUNABLES, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.mmap_threshold="
M_MMAP_THRESHOLD = -3


def give_back_freed() -> bool:
    """Set the threshold for this process and its forks; returns whether it was set.

    Not where the environment sets it already, nor with another C library than glibc.
    """
    if VARIABLE in os.environ or TUNABLE in os.environ.get(TUNABLES, ""):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and set_option(M_MMAP_THRESHOLD, THRESHOLD_BYTES) == 1
