"""What can be proven of the GPU environment on a machine that has no GPU.

    python -m checks gpu_ready [--parts names,layouts] > benchmarks/results/gpu_ready.json

Run in .venv-gpu (`make gpu-ready`). Each part is a process of its own that sees a stand-in driver
(driver.py) and no device; a part that lacks a package has failed, since set-up installs them all.
Every part also finds a planted fault, or has a unit test that plants it. On stderr a table says
what is proven, how and in how many seconds, and then what only a card can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Run the parts. options: the command line's."""
    from checks.gpu_ready.check import check_environment

    return check_environment(options)
