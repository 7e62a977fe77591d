"""Every package of the GPU environment that a learner or a server imports, and all that is ours."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from checks.gpu.record import PartFailed
from checks.gpu_ready.card import CARDS, pretend

PACKAGES = (
    "torch",
    "triton",
    "transformer_engine.pytorch",
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.gpt",
    "sgl_kernel",
    "flashinfer",
    "deep_gemm",
    "sglang.srt.managers.scheduler",
    "sglang.srt.entrypoints.http_server",
)
OURS = ("megatron_opd.learner", "megatron_opd.losses", "sglang_bridge.server")


def measure() -> dict[str, Any]:
    """Seconds by module. Raises PartFailed with what every module that does not import says."""
    pretend(CARDS["sm_90"])
    seconds, failed = imported([*PACKAGES, *own_modules()])
    figures = {
        "modules": len(seconds),
        "seconds": {name: seconds[name] for name in PACKAGES if name in seconds},
        "failed": failed,
    }
    if failed:
        name, said = next(iter(failed.items()))
        raise PartFailed(f"{len(failed)} modules do not import, the first: {name}: {said}", figures)
    return figures


def own_modules() -> Iterator[str]:
    """Every module of OURS but entries, which run when they are imported."""
    for package in OURS:
        yield package
        folder = Path(importlib.import_module(package).__path__[0])
        for found in pkgutil.walk_packages([str(folder)], f"{package}."):
            if not found.name.endswith(".__main__"):
                yield found.name


def imported(names: Iterable[str]) -> tuple[dict[str, float], dict[str, str]]:
    """(seconds by module, what it raised by module) of importing them in turn."""
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name in names:
        began_s = time.monotonic()
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # a loader may raise anything
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            seconds[name] = round(time.monotonic() - began_s, 2)
    return seconds, failed
