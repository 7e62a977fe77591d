"""What stands above every record's figures: how they were made, where, and of which code."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

from megatron_opd.metrics.summary import commit, versions


def machine() -> dict[str, Any]:
    """What a reader needs to know to compare."""
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        models = [line.partition(":")[2].strip() for line in cpuinfo if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def header(package: str, name: str, options: Sequence[str]) -> dict[str, Any]:
    """What was run, the command that repeats it, the commit, the machine and the engines."""
    return {
        "benchmark": name,
        "command": " ".join(["python -m", package, name, *options]),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }
