"""Slices of a checkpoint's tensors, and their mistakes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_opd.checkpoint.hf_reader import SafetensorsSource


def test_slices_and_their_mistakes(tmp_path: Path):
    tensor = torch.arange(24.0).view(4, 6)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert torch.equal(source.read("w", (4, 6), 1, 2, 3), tensor[:, 2:5])
    assert torch.equal(source.read("w", (4, 6), 0, 1, 2), tensor[1:3])
    with pytest.raises(ValueError, match="lacks the tensor v"):
        source.read("v", (4, 6), 0, 0, 4)
    with pytest.raises(ValueError, match=r"tensor w must have shape \[4, 8\] by config.json"):
        source.read("w", (4, 8), 0, 0, 4)
