"""Depth pruning: a checkpoint without some of its transformer layers.

Nothing else changes: embeddings, norms, tokenizer and chat template are the teacher's own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def prune(source: Path, out: Path, removed: Collection[int]) -> None:
    """Write the checkpoint `source` without the layers `removed` (from 0) into `out`.

    The layers that stay are numbered anew. ValueError: `removed` names no layers of the model, or
    all of them.
    """
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    layers = int(config["num_hidden_layers"])
    kept = [layer for layer in range(layers) if layer not in removed]
    if not kept or len(kept) + len(removed) != layers:
        raise ValueError(
            f"removed must name some of the layers 0 to {layers - 1}, each once, "
            f"got {sorted(removed)}"
        )
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in (WEIGHTS, CONFIG):
            shutil.copy(file, out / file.name)
    weights = without_layers(load_file(source / WEIGHTS), kept)
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    config["num_hidden_layers"] = len(kept)
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def without_layers(weights: dict[str, torch.Tensor], kept: list[int]) -> dict[str, torch.Tensor]:
    """Return the tensors outside the layers, and those of the layers `kept`, renumbered from 0."""
    new_index = {old: new for new, old in enumerate(kept)}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            found[name] = tensor
        elif int(layer[1]) in new_index:
            found[f"model.layers.{new_index[int(layer[1])]}.{layer[2]}"] = tensor
    return found
