"""A whole update on TransformerEngine's layers, computed by torch, against Megatron's local layers.

Tiny random models in float32; the local layers are those that the CPU suite holds to transformers.
Both compute the log-probs of every sampled token, one update with its loss, gradients and gradient
norm, and the log-probs after it. Control: a token of each segment
is rotated by the angles of another place.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from checks.gpu.record import PartFailed
from harness.tree import ROOT

LIMIT = 2e-5
"""Largest difference, relative to the largest number of the same tensor: float32 rounds a sum of
some hundred products to 1e-6, and AdamW's step divides gradients by their own size."""
TELLS = 1e-3
"""How much the planted fault must change at least."""
LAST_LINES = 20
_DENSE = frozenset({"Linear", "LayerNormLinear", "RMSNorm", "DotProductAttention", "rotary"})
COMPUTED = {"dense": _DENSE, "moe": _DENSE | {"GroupedLinear"}}
"""What of TransformerEngine a model must have been computed by."""
KINDS = ("local", "engine", "planted")


@dataclass(frozen=True)
class Case:
    """An update. model: dense or moe. learner: settings. replays: its batch gives the experts."""

    model: str
    learner: Mapping[str, Any]
    replays: bool = False


CASES = {
    "dense": Case("dense", {}),
    "dense, full recomputation": Case("dense", {"recompute": "full"}),
    "moe": Case("moe", {}),
    "moe, selective recomputation": Case("moe", {"recompute": "selective"}),
    "moe, replay, full recomputation": Case(
        "moe", {"routing_replay": "rollout", "recompute": "full"}, replays=True
    ),
    "moe, replay, selective recomputation": Case(
        "moe", {"routing_replay": "rollout", "recompute": "selective"}, replays=True
    ),
}
PLANTED = "dense"
"""The case in which the fault is planted."""


def measure() -> dict[str, Any]:
    """Largest difference by case. Raises PartFailed for one that is too large."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for kind in KINDS:
            (place / kind).mkdir()
            _run(kind, place)
        cases = {name: compared(place / "local", place / "engine", name) for name in CASES}
        control = compared(place / "local", place / "planted", PLANTED)
        calls = {name: _calls(place / "engine" / f"{name}.json") for name in CASES}
    figures = {"limit": LIMIT, "cases": cases, "calls": calls, "control": control}
    worst = {name: max(differences.values()) for name, differences in cases.items()}
    wrong = [name for name in worst if not worst[name] <= LIMIT]
    if wrong:
        raise PartFailed(f"{wrong[0]}: differs by {worst[wrong[0]]:.2g}, limit {LIMIT}", figures)
    bare = [name for name, case in CASES.items() if calls[name].keys() != COMPUTED[case.model]]
    if bare:
        raise PartFailed(f"{bare[0]}: other modules were computed", figures)
    if max(control.values()) < TELLS:
        raise PartFailed("the planted fault was not found", figures)
    return figures


def _calls(file: Path) -> dict[str, int]:
    return json.loads(file.read_text(encoding="utf-8"))


def compared(wanted: Path, found: Path, name: str) -> dict[str, float]:
    """{log-probs, gradients, ...: the largest difference of their tensors} of a case."""
    exact, ours = (load_file(each / f"{name}.safetensors") for each in (wanted, found))
    if exact.keys() != ours.keys():
        raise PartFailed(f"{name}: other tensors", {"others": sorted(exact.keys() ^ ours.keys())})
    worst: dict[str, float] = {}
    for key, tensor in exact.items():
        kind = key.partition(": ")[0]
        worst[kind] = max(worst.get(kind, 0.0), difference(ours[key], tensor))
    return worst


def difference(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference of two tensors, relative to the exact one's largest number."""
    gap = (found.double() - exact.double()).abs().max()
    scale = exact.double().abs().max()
    found_gap = float(gap if scale == 0 else gap / scale)
    return found_gap if math.isfinite(found_gap) else math.inf


def _run(kind: str, place: Path) -> None:
    """Compute the cases of a kind in a process of its own: what it patches stays there."""
    command = [sys.executable, "-m", "checks.gpu_ready.one_update", kind, str(place)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        last = done.stdout.splitlines()[-LAST_LINES:]
        print(done.stdout)
        raise PartFailed(f"{kind}: {last[-1] if last else 'no output'}", {"said": last})
