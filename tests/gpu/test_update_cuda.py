"""A bfloat16 update on CUDA is the float32 one on the CPU but for rounding, whichever the layers.

With a cache, packed segments, experts and replayed routing: what a run on a GPU computes with.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.dist.precision_jobs import compare
from tests.support.models import tiny_qwen3_moe
from tests.support.paths import ROOT

HAS_CUDA = torch.cuda.is_available()


def update(out: Path, model: Path, dtype: str, kernels: str, *, cuda: bool) -> dict[str, object]:
    """The figures of one update, in a process that sees a GPU or none."""
    out.mkdir()
    environment = dict(os.environ) | ({} if cuda else {"CUDA_VISIBLE_DEVICES": ""})
    arguments = [str(out), str(model), dtype, kernels]
    command = [sys.executable, "-m", "tests.gpu.one_update", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "figures.json").read_text())


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
    with ThreadPoolExecutor() as both:  # a process takes long to begin
        there = both.submit(update, tmp_path / "exact", model, "float32", "local", cuda=False)
        here = both.submit(update, tmp_path / "found", model, "bfloat16", kernels, cuda=True)
        exact, found = there.result(), here.result()
    assert (exact["device"], found["device"]) == ("cpu", "cuda:0")
    assert found["engine"] == (kernels == "installed")
    compare(f"bfloat16 on CUDA, {kernels} layers", tmp_path / "found", tmp_path / "exact")
