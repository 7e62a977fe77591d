"""Widens the experts of a checkpoint without changing what it computes: more work, the same model.

Every expert gets more features. Their gate and up projections are drawn, their columns of the down
projection are 0, so they add nothing until they are trained.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_opd.checkpoint.hf_files import SINGLE

WIDTH = "moe_intermediate_size"
STD = 0.02


def write_widened(source: Path, target: Path, features: int, seed: int = 0) -> Path:
    """Write `source` with so many features in each expert; returns `target`, which may be there.

    ValueError: the experts are as wide already.
    """
    if (target / SINGLE).exists():  # written last
        return target
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    more = features - config[WIDTH]
    if more <= 0:
        raise ValueError(f"{source}: experts have {config[WIDTH]} features, asked for {features}")
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name not in (SINGLE, "config.json"):
            shutil.copy(path, target / path.name)
    widened = json.dumps(config | {WIDTH: features}, indent=2)
    (target / "config.json").write_text(widened, encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / SINGLE)
    for name in sorted(tensors):
        if ".experts." in name:
            tensors[name] = _padded(name, tensors[name], more, generator)
    save_file(tensors, target / SINGLE, metadata={"format": "pt"})
    return target


def _padded(name: str, tensor: torch.Tensor, more: int, generator: torch.Generator) -> torch.Tensor:
    """Return a projection of an expert, with the new features after the old ones."""
    rows, columns = tensor.shape
    if name.endswith("down_proj.weight"):
        return torch.cat([tensor, torch.zeros(rows, more, dtype=tensor.dtype)], dim=1)
    drawn = torch.randn(more, columns, generator=generator) * STD
    return torch.cat([tensor, drawn.to(tensor.dtype)])
