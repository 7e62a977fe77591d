"""A learner on a GPU gives up its optimizer and gradients, and computes the same with them back."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.models import tiny_qwen3_moe
from tests.support.paths import ROOT

HAS_CUDA = torch.cuda.is_available()


def trained(out: Path, model: Path, dtype: str, way: str) -> dict[str, object]:
    """What tests/gpu/memory_rank.py found, in a process of its own."""
    out.mkdir()
    command = [sys.executable, "-m", "tests.gpu.memory_rank", str(out), str(model), dtype, way]
    environment = dict(os.environ) | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "result.json").read_text())


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_is_free_while_it_is_given_up_and_comes_back_bit_for_bit(dtype: str, tmp_path: Path):
    model = tiny_qwen3_moe(tmp_path / "model", seed=2, head_dim=64)
    ways = {"keep": tmp_path / "kept", "turns": tmp_path / "turns"}
    with ThreadPoolExecutor() as both:  # a process takes long to begin
        kept, turns = both.map(lambda way: trained(ways[way], model, dtype, way), ways)
    assert kept["device"] == turns["device"] == "cuda:0"
    assert turns["rows"] == kept["rows"]
    assert turns["digest"] == kept["digest"]
    assert kept["freed_bytes"] == 0
    # float32: two moments and a gradient for each parameter; bfloat16: a main parameter besides
    least = {"float32": 12, "bfloat16": 16}[dtype]
    assert turns["freed_bytes"] >= least * turns["parameters"]
