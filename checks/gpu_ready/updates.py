"""A whole update on TransformerEngine's layers, computed by torch, against Megatron's local layers.

Tiny random models; the local layers are those that the CPU suite holds to transformers. Both
compute the log-probs of every sampled token, one update with its loss, gradients and gradient norm,
and the weights and log-probs after it; over two ranks as two processes with gloo. What an option
must not change at all is compared with the same layers without it. Controls: faults in planted.py.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from checks.gpu.record import PartFailed
from checks.gpu_ready.cases import CASES, CONTROLS, TELLS, control_name
from harness.tree import ROOT

LAST_LINES = 20
KINDS = ("local", "engine")

Differences = Mapping[str, float]
"""{log-probs, gradients, ...: the largest difference of their tensors, over the ranks}."""


@dataclass(frozen=True)
class Found:
    """What the cases and controls gave.

    moved: by case, how much its update changed the log-probs. calls: by case, how often what was
    computed. controls: by control_name.
    """

    cases: Mapping[str, Differences]
    moved: Mapping[str, float]
    calls: Mapping[str, Mapping[str, int]]
    controls: Mapping[str, Differences]

    def problem(self) -> str | None:
        """Return what is wrong first; None: nothing."""
        for name, case in CASES.items():
            worst = max(self.cases[name].values())
            if not worst <= case.limit:
                return f"{name}: differs by {worst:.2g}, limit {case.limit}"
            if self.calls[name].keys() != case.expected:
                return f"{name}: other modules were computed"
            if not self.moved[name] >= TELLS:
                return f"{name}: the update changed nothing"
        for fault, name in CONTROLS:
            control = control_name(fault, name)
            if not max(self.controls[control].values()) > max(TELLS, CASES[name].limit):
                return f"the planted fault was not found: {control}"
        return None


def measure() -> dict[str, Any]:
    """Largest differences by case and control. Raises PartFailed, see Found.problem."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for kind in KINDS:
            _run(kind, place)
        found = Found(
            cases={name: compared_case(place, name, place / "engine" / name) for name in CASES},
            moved={name: movement(place / "engine" / name) for name in CASES},
            calls={name: _calls(place / "engine" / name) for name in CASES},
            controls={
                control: compared_case(place, name, place / "planted" / control)
                for fault, name in CONTROLS
                for control in [control_name(fault, name)]
            },
        )
    expected = {
        name: {"limit": case.limit, "of": case.like or f"local: {case.as_local or name}"}
        for name, case in CASES.items()
    }
    figures = {"tells": TELLS, "expected": expected} | asdict(found)
    problem = found.problem()
    if problem is not None:
        raise PartFailed(problem, figures)
    return figures


def compared_case(place: Path, name: str, found: Path) -> dict[str, float]:
    """Compare what was found in a case with the numbers that it must have."""
    case = CASES[name]
    other = ("engine", case.like) if case.like else ("local", case.as_local or name)
    differences = compared(place.joinpath(*other), found)
    return {kind: worst for kind, worst in differences.items() if kind not in case.except_for}


def _calls(folder: Path) -> dict[str, int]:
    return json.loads((folder / "calls.json").read_text(encoding="utf-8"))


def compared(wanted: Path, found: Path) -> dict[str, float]:
    """Compare the files of two cases, one of each rank. Raises PartFailed for other tensors."""
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
