"""A checkpoint with a weight that is no number is refused when it is loaded, by every rank."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dist import jobs
from tests.dist.worlds import run_world
from tests.support.models import tiny_qwen3

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_is_named_by_every_rank(tmp_path: Path, value: float):
    model = tiny_qwen3(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][5, -1] = value  # of the second tensor-parallel rank alone
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    found = run_world(
        jobs.refused_weights, 2, tmp_path, model=model, config={"parallel": {"tp": 2}}
    )
    assert (
        found["said"] == [f"{model}: 1 tensors hold numbers that are not finite, first {name}"] * 2
    )
