"""What is installed here: the GPU, its driver, torch, the engines and the kernels they bring."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "megatron-core",
    "transformer-engine",
    "transformer-engine-torch",
    "pydantic",
)


def measure(limit_s: float, *, dry: bool) -> dict[str, Any]:
    """Names and versions; null for what is not here."""
    return {
        "gpus": [] if dry else [_gpu(index) for index in range(torch.cuda.device_count())],
        "driver": None if dry else _driver(),
        "cuda_of_torch": torch.version.cuda,
        "glibc": " ".join(platform.libc_ver()),
        "packages": {package: _version(package) for package in PACKAGES},
    }


def _gpu(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_gib": round(found.total_memory / 2**30, 1),
    }


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
