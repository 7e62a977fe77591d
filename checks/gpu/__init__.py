"""One check of a machine with a GPU: what works there, and how fast.

    python -m checks gpu [--budget-s 540] [--out gpu-check.json] [--parts lean,step] [--dry]

The parts come in order of worth, each in a process of its own, and none needs another's success:
what is installed, tests/gpu, the blockwise log-prob operation, draws and scores, weights between
two processes on one GPU, one training step, a complete run. A part that needs a package which is
not here is skipped and names it; a part that fails is recorded with its last lines. The record is
rewritten after every part, so that a check that is cut short keeps what it found.

--dry runs every part's code at a tiny size on the CPU and says nothing about a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Check this machine. options: the command line's."""
    from checks.gpu.check import check_machine

    return check_machine(options)
