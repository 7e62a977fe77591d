"""A checkpoint's tensors under the names that every part of the project but its files uses."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_opd.checkpoint.packing import part_of
from megatron_opd.models.places import places
from megatron_opd.models.spec import read_model_spec


def checkpoint_tensors(model: Path) -> dict[str, torch.Tensor]:
    """Everything of a checkpoint of one file; what the file holds fused is taken apart."""
    found = load_file(model / "model.safetensors")
    fused = {n: p for n, p in places(read_model_spec(model), found).items() if not p.is_whole}
    apart = {name: part_of(found[place.name], place).contiguous() for name, place in fused.items()}
    for name in {place.name for place in fused.values()}:
        del found[name]
    return found | apart
