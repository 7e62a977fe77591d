"""Rows as numbers of one byte and a scale, against the definition in float64."""

import pytest
import torch

from sglang_bridge.weights.formats import Format, is_quantised, scales_of
from sglang_bridge.weights.quantise import (
    LARGEST,
    SMALLEST_SCALE,
    dequantised,
    quantised,
    row_maxima,
    row_scales,
)
from tests.support.figures import bounded
from tests.support.models import tiny_mixtral, tiny_qwen2, tiny_qwen2_moe, tiny_qwen3_moe
from tests.support.quantised import is_kept, quantised_oracle

FORMATS: tuple[Format, ...] = ("int8", "fp8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def odd_rows() -> torch.Tensor:
    """Rows of every size, and those that are easily got wrong."""
    noise = torch.randn(8, 33, generator=torch.Generator().manual_seed(3))
    rows = noise * torch.tensor([[1e-30], [1e-6], [0.02], [1.0], [300.0], [1.5e4], [1.0], [1.0]])
    rows[6] = 0  # a row of zeros of both signs
    rows[6, ::2] = -0.0
    rows[7, 5] = -5e4  # one huge value beside small ones
    ties = torch.arange(33.0).remainder(9).sub(4) / 2  # halfway between the steps of a scale of 1
    ties[0] = 127
    return torch.cat([rows, ties[None], ties[None] * 2.0**-20])


def in_one_go(matrix: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    scales = row_scales(row_maxima(matrix), format)
    return quantised(matrix, scales, format), scales


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_are_those_of_the_definition(format: Format, dtype: torch.dtype):
    matrix = odd_rows().to(dtype)
    numbers, scales = in_one_go(matrix, format)
    expected, by = quantised_oracle(matrix, format)
    assert torch.equal(scales, by)
    assert torch.equal(bits(numbers), bits(expected))
    assert numbers.dtype.itemsize == 1
    assert (scales.dtype, scales.shape) == (torch.float32, (len(matrix), 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_int8_error_is_half_a_step_at_most(dtype: torch.dtype):
    exact = odd_rows().to(dtype)
    found = dequantised(*in_one_go(exact, "int8")).double()
    step = exact.double().abs().amax(1, keepdim=True) / 127
    worst = (found - exact.double()).abs() / step.clamp(min=1e-45)
    bounded("int8 rows: error in steps of the row", float(worst.max()), 0.5 + 1e-4)
    assert torch.equal(found[6], torch.zeros(33, dtype=torch.float64))


def test_an_fp8_error_is_a_sixteenth_of_the_number_at_most():
    exact = odd_rows()
    numbers, scales = in_one_go(exact, "fp8")
    found = dequantised(numbers, scales).double()
    normal = exact.abs() >= scales * 2.0**-6
    relative = ((found - exact).abs() / exact.abs())[normal]
    bounded("fp8 rows: relative error of normal numbers", float(relative.max()), 2.0**-4 + 1e-6)
    absolute = ((found - exact).abs() / scales)[~normal]
    assert float(absolute.max()) <= 2.0**-10 + 1e-9, "half the least step below them"
    assert float(numbers.float().abs().max()) == LARGEST["fp8"]


@pytest.mark.parametrize("format", FORMATS)
def test_columns_apart_are_those_of_the_whole(format: Format):
    """With the largest magnitudes of whole rows, as ranks that share rows exchange them."""
    matrix = odd_rows()
    whole, scales = in_one_go(matrix, format)
    halves = [matrix[:, :10], matrix[:, 10:]]
    largest = torch.maximum(*(row_maxima(half) for half in halves))
    assert torch.equal(row_scales(largest, format), scales)
    found = torch.cat([bits(quantised(half, scales, format)) for half in halves], 1)
    assert torch.equal(found, bits(whole))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_below_normal_numbers_are_zeros_with_a_normal_scale(format: Format):
    """A device that flushes denormals would divide by zero otherwise."""
    matrix = torch.tensor([[1e-45, -3e-42, 0.0], [1e-38, 0.0, -1e-38]])
    numbers, scales = in_one_go(matrix, format)
    assert (scales >= SMALLEST_SCALE).all()
    assert not numbers[0].float().any()
    assert (dequantised(numbers, scales) - matrix).abs().max() <= SMALLEST_SCALE / 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_that_is_no_number_stays_visible(format: Format, bad: float):
    matrix = odd_rows()
    matrix[2, 4] = bad
    found = dequantised(*in_one_go(matrix, format))
    assert not found[2].isfinite().all()
    assert found[[0, 1, 3, 4, 5]].isfinite().all()


def test_what_is_quantised_is_what_multiplies(tmp_path_factory: pytest.TempPathFactory):
    """Attention, MLP and experts of every family; the rest stays."""
    from safetensors import safe_open

    for make in (tiny_qwen2, tiny_qwen2_moe, tiny_qwen3_moe, tiny_mixtral):
        model = make(tmp_path_factory.mktemp("model") / "m")
        with safe_open(model / "model.safetensors", "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        chosen = {name for name, shape in shapes.items() if is_quantised(name, len(shape))}
        assert chosen == {name for name in shapes if not is_kept(name)}
        assert len(chosen) > len(shapes) / 3
        assert not any(is_quantised(scales_of(name), 2) for name in chosen)
