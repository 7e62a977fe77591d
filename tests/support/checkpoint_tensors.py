"""A checkpoint's tensors under the names that every part of the project but its files uses."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_opd.checkpoint.packing import part_of
from megatron_opd.models.places import places
from megatron_opd.models.spec import read_model_spec


def checkpoint_tensors(model: Path) -> dict[str, torch.Tensor]:
    """Everything of a checkpoint of one file that text goes through.

    What the file holds fused is taken apart.
    """
    found, spec = load_file(model / "model.safetensors"), read_model_spec(model)
    own = {
        name: found[place.name] if place.is_whole else part_of(found[place.name], place)
        for name, place in places(spec, found).items()
    }
    used = {place.name for place in places(spec, found).values()}
    others = {
        name: each
        for name, each in found.items()
        if name not in used and not name.startswith(spec.carried)
    }
    return others | {name: each.contiguous() for name, each in own.items()}
