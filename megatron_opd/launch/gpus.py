"""Finds the GPUs that the processes of this machine may use, without importing torch.

Invariant: nothing else in the package asks the driver, so that all parts count the same GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata

import pynvml

from sglang_bridge.gpus import visible_gpus


def gpus_here(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return what CUDA calls each GPU that this process may use; GPU i of a configuration is [i].

    environment: default: this process's, where Slurm, a container or the user may have left some of
    the machine's GPUs out (CUDA_VISIBLE_DEVICES). A torch without CUDA uses none.
    """
    found = os.environ if environment is None else environment
    return () if torch_is_for_cpus() else visible_gpus(found, driver_count())


def has_gpu() -> bool:
    """Return whether this process may use a GPU."""
    return bool(gpus_here())


def driver_count() -> int:
    """Return how many GPUs the driver reports; a machine without a driver has none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()


def torch_is_for_cpus() -> bool:
    """Return whether the installed torch says in its version that it was built without CUDA."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False  # a plan needs none
