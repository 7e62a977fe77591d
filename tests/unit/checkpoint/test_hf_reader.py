"""Slices of a checkpoint's tensors, and their mistakes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_opd.checkpoint.hf_reader import SafetensorsSource
from megatron_opd.models.spec import read_model_spec

NAME = "model.layers.1.mlp.down_proj.weight"


def test_slices_and_their_mistakes(dense: Path, tmp_path: Path):
    spec, tensors = read_model_spec(dense), load_file(dense / "model.safetensors")
    shape = tuple(tensors[NAME].shape)
    source = SafetensorsSource(dense, spec)
    assert torch.equal(source.read(NAME, shape, 1, 2, 3), tensors[NAME][:, 2:5])
    assert torch.equal(source.read(NAME, shape, 0, 1, 2), tensors[NAME][1:3])
    with pytest.raises(ValueError, match="lacks the tensor v"):
        source.read("v", (4, 6), 0, 0, 4)
    tensors[NAME] = tensors[NAME][:, 1:].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"tensor {NAME} must have shape .* by config.json"):
        SafetensorsSource(tmp_path, spec).read(NAME, shape, 0, 0, 4)
