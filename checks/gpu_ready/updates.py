"""A whole update on TransformerEngine's layers, computed by torch, against Megatron's local layers.

Tiny random models in float32; the local layers are those that the CPU suite holds to transformers.
Both compute the log-probs of every sampled token, one update with its loss, gradients and gradient
norm, and the log-probs after it; over two ranks as two processes with gloo. What an option must not
change at all is compared with the same layers without it. Controls: planted faults (cases.py).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from checks.gpu.record import PartFailed
from checks.gpu_ready.cases import CASES, CONTROLS, TELLS
from harness.tree import ROOT

LAST_LINES = 20
KINDS = ("local", "engine")


def measure() -> dict[str, Any]:
    """Largest difference by case. Raises PartFailed for one that is too large."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for kind in KINDS:
            _run(kind, place)
        cases = {
            name: compared(expected_of(place, name), place / "engine" / name) for name in CASES
        }
        moved = {name: movement(place / "engine" / name) for name in CASES}
        calls = {name: _calls(place / "engine" / name) for name in CASES}
        controls = {
            fault: compared(expected_of(place, name), place / "planted" / fault)
            for fault, name in CONTROLS.items()
        }
    figures = {
        "limits": {name: case.limit for name, case in CASES.items()},
        "cases": cases,
        "like": {name: case.like for name, case in CASES.items() if case.like},
        "moved": moved,
        "calls": calls,
        "controls": controls,
    }
    for name, differences in cases.items():
        limit, worst = CASES[name].limit, max(differences.values())
        if not worst <= limit:
            raise PartFailed(f"{name}: differs by {worst:.2g}, limit {limit}", figures)
        if calls[name].keys() != CASES[name].expected:
            raise PartFailed(f"{name}: other modules were computed", figures)
        if not moved[name] >= TELLS:
            raise PartFailed(f"{name}: the update changed nothing", figures)
    for fault, differences in controls.items():
        if not max(differences.values()) >= max(TELLS, CASES[CONTROLS[fault]].limit):
            raise PartFailed(f"the planted fault was not found: {fault}", figures)
    return figures


def expected_of(place: Path, name: str) -> Path:
    """Where the numbers lie that a case must have."""
    case = CASES[name]
    return place / "engine" / case.like if case.like else place / "local" / (case.as_local or name)


def _calls(folder: Path) -> dict[str, int]:
    return json.loads((folder / "calls.json").read_text(encoding="utf-8"))


def compared(wanted: Path, found: Path) -> dict[str, float]:
    """{log-probs, gradients, ...: the largest difference of their tensors, over the ranks}."""
    worst: dict[str, float] = {}
    files = sorted(wanted.glob("*.safetensors"))
    if [file.name for file in files] != sorted(file.name for file in found.glob("*.safetensors")):
        raise PartFailed(f"{found.name}: other ranks", {})
    for file in files:
        exact, ours = load_file(file), load_file(found / file.name)
        if exact.keys() != ours.keys():
            others = sorted(exact.keys() ^ ours.keys())
            raise PartFailed(f"{found.name}: other tensors", {"others": others})
        for key, tensor in exact.items():
            kind = key.partition(": ")[0]
            worst[kind] = max(worst.get(kind, 0.0), difference(ours[key], tensor))
    return worst


def movement(folder: Path) -> float:
    """How much an update changed the log-probs, by its first rank."""
    found = load_file(folder / "0.safetensors")
    return difference(found["log-probs after"], found["log-probs"])


def difference(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference of two tensors, relative to the exact one's largest number."""
    gap = (found.double() - exact.double()).abs().max()
    scale = exact.double().abs().max()
    found_gap = float(gap if scale == 0 else gap / scale)
    return found_gap if math.isfinite(found_gap) else math.inf


def _run(kind: str, place: Path) -> None:
    """Compute the cases of a kind in a process of its own: what it imports stays there."""
    command = [sys.executable, "-m", "checks.gpu_ready.one_update", kind, str(place)]
    # Megatron's fused formulas run as they are written: the compiler of a CPU proves nothing
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        last = done.stdout.splitlines()[-LAST_LINES:]
        print(done.stdout)
        raise PartFailed(f"{kind}: {last[-1] if last else 'no output'}", {"said": last})
