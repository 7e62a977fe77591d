"""A bfloat16 update on CUDA is the float32 one on the CPU but for rounding, whichever the layers.

With a cache, packed segments, experts and replayed routing: what a run on a GPU computes with.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.dist.precision_jobs import compare
from tests.support.models import tiny_qwen3_moe
from tests.support.side_by_side import side_by_side

HAS_CUDA = torch.cuda.is_available()


def updates(scratch: Path, model: Path, kernels: str) -> list[dict[str, object]]:
    """Figures of an update in float32 without a GPU and in bfloat16 with one, each in a process."""
    cases = (
        ("exact", "float32", "local", {"CUDA_VISIBLE_DEVICES": ""}),
        ("found", "bfloat16", kernels, {}),
    )
    commands, environments = [], []
    for name, dtype, layers, more in cases:
        (scratch / name).mkdir()
        arguments = [str(scratch / name), str(model), dtype, layers]
        commands.append([sys.executable, "-m", "tests.gpu.one_update", *arguments])
        environments.append(dict(os.environ) | more)
    side_by_side(commands, environments)
    return [json.loads((scratch / case[0] / "figures.json").read_text()) for case in cases]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(
    "kernels",
    [
        "local",
        pytest.param(
            "installed",
            marks=pytest.mark.skipif(
                find_spec("transformer_engine") is None, reason="needs TransformerEngine"
            ),
        ),
    ],
)
def test_bfloat16_on_cuda_is_near_float32_on_the_cpu(kernels: str, tmp_path: Path):
    # heads of 64 features: the smallest that TransformerEngine's attention kernels take gladly
    model = tiny_qwen3_moe(tmp_path / "model", seed=2, head_dim=64)
    exact, found = updates(tmp_path, model, kernels)
    assert (exact["device"], found["device"]) == ("cpu", "cuda:0")
    assert found["engine"] == (kernels == "installed")
    compare(f"bfloat16 on CUDA, {kernels} layers", tmp_path / "found", tmp_path / "exact")
