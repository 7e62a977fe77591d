"""Published weights on the grid of a low-precision sampler."""

import pytest
import torch

from megatron_opd.weight_sync.rounding import rounded
from sglang_bridge.weights.formats import EXACT, Grid

FP8 = torch.float8_e4m3fn
LARGEST: dict[Grid, int] = {"int8": 127, "int4": 7, "int3": 3}
NAME = "model.layers.0.mlp.experts.1.up_proj.weight"


def weights(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    scale = torch.tensor([[1e-6], [0.02], [1.0], [300.0], [0.0]])
    noise = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    return (noise * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grid", LARGEST)
def test_rows_have_equal_steps_and_the_nearest_one_is_taken(dtype: torch.dtype, grid: Grid):
    largest, exact = LARGEST[grid], weights(dtype)
    step = exact.float().abs().amax(1, keepdim=True) / largest
    found = rounded(NAME, exact, grid)
    assert found.dtype == dtype
    slack = 1e-5 if dtype == torch.float32 else 2**-8 * largest
    assert ((found.float() - exact.float()).abs() <= step * (0.5 + slack)).all()
    steps = found.float()[:4] / step[:4]
    assert (steps - steps.round()).abs().max() <= slack
    assert len(steps[2].round().unique()) <= 2 * largest + 1, "more levels than the grid has"
    assert not found[4].any()
    assert (found[1] != exact[1]).float().mean() > 0.5, "rounding must change most weights"


def test_fp8_keeps_three_bits_of_mantissa():
    exact = weights()
    found = rounded(NAME, exact, "fp8")
    scale = exact.abs().amax(1, keepdim=True) / torch.finfo(FP8).max
    assert torch.equal((found / scale)[:4].to(FP8).float() * scale[:4], found[:4])
    normal = exact[2].abs() > scale[2] * 2**-6
    relative = ((found[2] - exact[2]).abs() / exact[2].abs())[normal]
    assert 2**-6 < relative.max() <= 2**-4 * 1.001


def test_what_such_samplers_keep_exact_stays_exact():
    exact = weights()
    assert rounded(NAME, exact, None) is exact
    assert rounded("model.norm.weight", exact[0], "int8") is not None
    assert torch.equal(rounded("model.norm.weight", exact[0], "int8"), exact[0])
    for part in EXACT:
        assert rounded(f"model{part}weight", exact, "fp8") is exact
