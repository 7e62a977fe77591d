"""Two of the kernels that SGLang compiles when a server first starts, with a server's environment.

A toolkit without headers, or without the links that linkers look for, shows here, and not in the
log of a server that died. Control: a toolkit without a compiler must fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from checks.gpu.record import PartFailed
from sglang_bridge.server.compat import hooks
from sglang_bridge.server.compiling import kernels as named_in
from sglang_bridge.server.compiling import say_kernel
from sglang_bridge.server.spec import ServerSpec, server_env
from sglang_bridge.toolkit import CACHE_VARIABLE, VARIABLES, kept_kernels

TARGET = "sm90a"
LIMIT_S = 240.0
LAST_LINES = 20


def measure() -> dict[str, Any]:
    """Seconds by kernel. Raises PartFailed when one does not compile, or the control does."""
    base = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment = server_env(ServerSpec(model_path="m", role="student", port=31_000), base)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        figures = compiled(environment, place / "cache", place / "found.json")
        (place / "empty").mkdir()
        without = environment | {"CUDA_HOME": str(place / "empty")}
        control = compiled(without, place / "none", place / "control.json")
    found = {
        "cuda_home": Path(environment["CUDA_HOME"]).name,
        **figures,
        "control": {"compiled": list(control["seconds"]), "failed": list(control["failed"])},
    }
    if figures["failed"]:
        raise PartFailed(f"{next(iter(figures['failed']))} does not compile", found)
    if figures["targets"] != [TARGET]:
        raise PartFailed(f"compiled for {figures['targets']}, not {TARGET}", found)
    if len(figures["named"]) != len(figures["seconds"]):
        raise PartFailed(f"the log names {figures['named']} as they are compiled", found)
    if figures["kept"] != len(figures["seconds"]):
        raise PartFailed(f"{figures['kept']} kernels are found to be kept", found)
    if control["seconds"]:
        raise PartFailed("kernels compile without a compiler: another one was taken", found)
    return found


def compiled(environment: Mapping[str, str], cache: Path, out: Path) -> dict[str, Any]:
    """What this module's process finds in an environment, with a kernel cache of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "checks.gpu_ready.kernels", str(out)],
        env={**environment, CACHE_VARIABLE: str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    if not out.exists():
        last = done.stdout.splitlines()[-LAST_LINES:]
        raise PartFailed(f"no figures: {last[-1] if last else 'no output'}", {"said": last})
    log = out.with_suffix(".log")
    log.write_text(done.stdout, encoding="utf-8")
    targets = {file.relative_to(cache).parts[0] for file in cache.rglob("*.so")}
    return json.loads(out.read_text(encoding="utf-8")) | {
        "targets": sorted(targets),
        "named": named_in(log),
        "kept": kept_kernels({CACHE_VARIABLE: str(cache)})[1],
    }


def main() -> None:
    """Entry point of the process that compiles."""
    from checks.gpu_ready.card import CARDS, pretend

    pretend(CARDS["sm_90"])
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks.hook(hooks.BUILD_LOCK, say_kernel, "before")
    HookRegistry.apply_hooks()
    from sglang.kernels.ops.activation import activation
    from sglang.kernels.ops.kvcache import kvcache

    kernels: dict[str, Callable[[], object]] = {
        "activation": lambda: activation.activation_module(torch.bfloat16),
        "kvcache": lambda: kvcache._jit_kvcache_module(2048, 2048, 128),  # pyright: ignore
    }
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, make in kernels.items():
        began_s = time.monotonic()
        try:
            make()
        except Exception as error:  # noqa: BLE001  # whatever its compiler's end raises
            failed[name] = str(error)[-1000:]
        else:
            seconds[name] = round(time.monotonic() - began_s, 1)
    found = {"seconds": seconds, "failed": failed}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
