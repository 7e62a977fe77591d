"""The cases: what is planted into a server's checkpoint, and the healthy runs beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.models import tiny_mixtral, tiny_qwen3, tiny_qwen3_moe

WEIGHTS = "model.safetensors"
EMBEDDING_STD = 0.02  # of a trained model's; eps acts on it
HEAD_STD = 3.5  # of the logits: about 2 nats of entropy
Tree = dict[str, Any]
FAMILIES: Mapping[str, Callable[..., Path]] = {
    "dense": tiny_qwen3,
    "experts": tiny_qwen3_moe,
    "mixtral": tiny_mixtral,
}


@dataclass(frozen=True)
class Case:
    """One run. plant: what is wrong with the server's model, by its name in PLANTS; None: nothing.

    more: sections of the configuration, for both sides.
    """

    family: str
    dtype: str
    plant: str | None = None
    more: Tree = field(default_factory=Tree)

    @property
    def name(self) -> str:
        """Names its row."""
        kinds = [f"{value}" for section in self.more.values() for value in section.values()]
        return " ".join([self.plant or "healthy", self.family, self.dtype, *kinds])


def rope_scaling(served: Path) -> None:
    """What model cards tell to add; here beside rope_parameters."""
    _edit(served, rope_scaling={"rope_type": "linear", "factor": 4.0})


def eps(served: Path) -> None:
    """Mixtral's own default, where the learner's side was given another family's."""
    _edit(served, rms_norm_eps=1e-5)


def missing_tensor(served: Path) -> None:
    """A projection that a server never loaded: memory as the system hands it out, zeros."""
    _change(
        served, lambda name: name.endswith("layers.1.self_attn.k_proj.weight"), torch.zeros_like
    )


def transposed_experts(served: Path) -> None:
    """The experts in reverse, with their routers as they were."""
    tensors = load_file(served / WEIGHTS)
    count = 1 + max(
        int(name.split(".experts.")[1].split(".")[0]) for name in tensors if ".experts." in name
    )
    moved: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            name = f"{before}.experts.{count - 1 - int(number)}.{rest}"
        moved[name] = tensor
    save_file(moved, served / WEIGHTS, {"format": "pt"})


def other_checkpoint(served: Path) -> None:
    """Other weights of the same shapes: as far off as training moves them in a long run."""
    generator = torch.Generator().manual_seed(99)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator)
        return tensor + 0.3 * tensor.std() * noise

    _change(served, lambda name: True, moved)


PLANTS: Mapping[str, Callable[[Path], None]] = {
    "rope_scaling": rope_scaling,
    "model_override_args": lambda served: None,
    "eps": eps,
    "missing_tensor": missing_tensor,
    "other_checkpoint": other_checkpoint,
    "transposed_experts": transposed_experts,
}
SERVER_ARGS: Mapping[str, tuple[str, ...]] = {
    "model_override_args": (
        "--json-model-override-args",
        json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ),
}
"""What the server alone is started with."""


def all_cases() -> list[Case]:
    """First the six in float32, then those that bfloat16 can show, then what is healthy."""
    plants = [
        Case("dense", "float32", "rope_scaling"),
        Case("dense", "float32", "model_override_args"),
        Case("mixtral", "float32", "eps"),
        Case("dense", "float32", "missing_tensor"),
        Case("dense", "float32", "other_checkpoint"),
        Case("experts", "float32", "transposed_experts"),
    ]
    half = [
        Case("dense", "bfloat16", "rope_scaling"),
        Case("dense", "bfloat16", "other_checkpoint"),
        Case("experts", "bfloat16", "transposed_experts"),
        Case("dense", "bfloat16", "model_override_args"),
        Case("dense", "bfloat16", "missing_tensor"),
    ]
    replay = {"learner": {"routing_replay": "rollout"}}
    healthy = [
        Case("dense", "float32"),
        Case("mixtral", "float32"),
        Case("experts", "bfloat16"),
        Case("dense", "bfloat16"),
        Case("dense", "bfloat16", None, {"student": {"quantization": "int8"}}),
        Case("dense", "bfloat16", None, {"student": {"quantization": "fp8"}}),
        Case("experts", "bfloat16", None, replay),
        Case("experts", "bfloat16", None, {"student": {"quantization": "int8"}}),
        Case("experts", "float32"),
        Case("dense", "float32", None, {"weight_sync": {"round_to": "int4"}}),
    ]
    return [*plants, *healthy[:5], *half[:3], *healthy[5:7], *half[3:], *healthy[7:]]


def write_model(case: Case, path: Path) -> Path:
    """The learner's checkpoint: eps as a family has it whose config.json names it."""
    FAMILIES[case.family](path, seed=3, head_std=HEAD_STD)
    if case.plant == "eps":
        _edit(path, rms_norm_eps=1e-6)
    _change(path, lambda name: "embed_tokens" in name, lambda tensor: EMBEDDING_STD * tensor)
    return path


def _edit(model: Path, **fields: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _change(
    model: Path, chosen: Callable[[str], bool], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensors = load_file(model / WEIGHTS)
    found = {n: change(t).contiguous() if chosen(n) else t for n, t in tensors.items()}
    save_file(found, model / WEIGHTS, {"format": "pt"})
