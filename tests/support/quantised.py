"""What quantised servers must hold, computed without the code under test."""

from collections.abc import Mapping

import torch

from sglang_bridge.weights.formats import Format

LARGEST = {"int8": 127.0, "fp8": 448.0}
KEPT = ("embed_tokens", "lm_head", "mlp.gate.", "_gate.", "block_sparse_moe.gate.", "norm", "bias")
FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
"""What each byte stands for; NaN at 127 and 255."""


def quantised_oracle(weight: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers, scales) of a matrix: the nearest value of the grid, ties to the even one.

    Scales and quotients are rounded to float32 as the definition says, everything else is float64.
    """
    largest = weight.double().abs().amax(1, keepdim=True)
    scales = (largest / LARGEST[format]).float().clamp(min=torch.finfo(torch.float32).tiny)
    steps = (weight.double() / scales.double()).float().double()
    steps = steps.clamp(-LARGEST[format], LARGEST[format])
    if format == "int8":
        return steps.round().to(torch.int8), scales
    return _nearest_fp8(steps), scales


def _nearest_fp8(steps: torch.Tensor) -> torch.Tensor:
    """The nearer of the two magnitudes around each; the sign, also that of -0, is kept."""
    magnitudes, exact = FP8_VALUES[:127], steps.abs()
    high = torch.searchsorted(magnitudes, exact).clamp(1, 126)
    to_low, to_high = exact - magnitudes[high - 1], magnitudes[high] - exact
    takes_high = (to_high < to_low) | ((to_high == to_low) & (high % 2 == 0))
    chosen = torch.where(takes_high, high, high - 1)
    return (chosen + 128 * torch.signbit(steps)).to(torch.uint8).view(torch.float8_e4m3fn)


def is_kept(name: str) -> bool:
    """Whether a tensor stays as it is."""
    return any(part in name for part in KEPT)


def held_oracle(
    tensors: Mapping[str, torch.Tensor], format: Format, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """All that a server of `dtype` holds of a checkpoint, whole, by name."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if is_kept(name):
            found[name] = tensor.to(dtype)
        else:
            numbers, scales = quantised_oracle(tensor.to(dtype), format)
            found |= {name: numbers, f"{name}_scale": scales}
    return found


def dequantised_oracle(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that a server computes with, float32, under the checkpoint's names."""
    return {
        name: (tensor.double() * held[f"{name}_scale"].double()).float()
        if f"{name}_scale" in held
        else tensor.float()
        for name, tensor in held.items()
        if not name.endswith("_scale")
    }
