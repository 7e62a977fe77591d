"""A learner on a GPU gives up its optimizer and gradients, and computes the same with them back."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.support.models import tiny_qwen3_moe
from tests.support.side_by_side import side_by_side

HAS_CUDA = torch.cuda.is_available()


def trained(scratch: Path, model: Path, dtype: str) -> list[dict[str, object]]:
    """What memory_rank.py found with memory kept and in turns, each in a process of its own."""
    ways = ("keep", "turns")
    for way in ways:
        (scratch / way).mkdir()
    rank = [sys.executable, "-m", "tests.gpu.memory_rank"]
    commands = [[*rank, str(scratch / way), str(model), dtype, way] for way in ways]
    environment = dict(os.environ) | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    side_by_side(commands, [environment] * len(ways))
    return [json.loads((scratch / way / "result.json").read_text()) for way in ways]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_is_free_while_it_is_given_up_and_comes_back_bit_for_bit(dtype: str, tmp_path: Path):
    model = tiny_qwen3_moe(tmp_path / "model", seed=2, head_dim=64)
    kept, turns = trained(tmp_path, model, dtype)
    assert kept["device"] == turns["device"] == "cuda:0"
    assert turns["rows"] == kept["rows"]
    assert turns["digest"] == kept["digest"]
    assert kept["freed_bytes"] == 0
    # float32: two moments and a gradient for each parameter; bfloat16: a main parameter besides
    least = {"float32": 12, "bfloat16": 16}[dtype]
    assert turns["freed_bytes"] >= least * turns["parameters"]
