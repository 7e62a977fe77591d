"""Turns quantised matrices of published checkpoints into plain ones, to transformers' bits.

Reference: transformers.integrations.finegrained_fp8.Fp8Dequantize and
transformers.integrations.mxfp4.convert_moe_packed_tensors. Unlike the first, a last block may hold
fewer rows or columns, as DeepSeek-V3's own files have it. Axes: R rows, C columns, E experts, G
groups of 32 columns, B bytes of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from sglang_bridge.weights.checkpoint_formats import CheckpointFormat

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the numbers of four bits (e2m1); the highest bit is the sign."""
EXPONENT_BIAS = 127
NO_NUMBER = 255
"""The byte that is no power of two but NaN (e8m0)."""


def from_fp8(
    numbers_RC: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], first_row: int = 0
) -> torch.Tensor:
    """Return float32 [R, C]: each number times the scale of its block.

    scales: of the blocks of the whole matrix. first_row: where these rows begin in it.
    """
    rows, columns = numbers_RC.shape
    begin, end = first_row // block[0], -(-(first_row + rows) // block[0])
    by_row = scales[begin:end].float().repeat_interleave(block[0], 0)
    by_row = by_row[first_row - begin * block[0] :][:rows]
    return numbers_RC.float().mul_(by_row.repeat_interleave(block[1], 1)[:, :columns])


def from_mxfp4(blocks_ERGB: torch.Tensor, scales_ERG: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [E, 32 G, R], which holds every such number exactly.

    Of a byte, the lower four bits come first.
    """
    values = torch.tensor((*FP4, *(-each for each in FP4)), dtype=torch.bfloat16)
    values = values.to(blocks_ERGB.device)
    pairs = torch.stack((values[(blocks_ERGB & 15).int()], values[(blocks_ERGB >> 4).int()]), -1)
    exponents = scales_ERG.int() - EXPONENT_BIAS
    plain = torch.ldexp(pairs.flatten(-2), exponents.unsqueeze(-1))
    return plain.flatten(-2).transpose(1, 2).contiguous()


def dequantised(
    tensors: Iterable[tuple[str, torch.Tensor]], format: CheckpointFormat
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors under their own names, the quantised ones de-quantised.

    A tensor comes once both its numbers and its scales came. ValueError, one line: one of them is
    missing, or of a wrong type or shape, or a scale is no number.
    """
    waiting: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        part = _part_of(name, tensor, format)
        if part is None:
            yield name, tensor
            continue
        base = name.removesuffix(part)
        if base not in waiting:
            waiting[base] = part, tensor
            continue
        other, held = waiting.pop(base)
        if other == part:
            raise ValueError(f"{name} is there twice")
        numbers, scales = (held, tensor) if part == format.scales_suffix else (tensor, held)
        yield base, _joined(base, numbers, scales, format)
    for base, (part, _) in waiting.items():
        lacking = format.numbers_suffix if part == format.scales_suffix else format.scales_suffix
        raise ValueError(f"{base}{part} has no {base}{lacking} ({format})")


def _part_of(name: str, tensor: torch.Tensor, format: CheckpointFormat) -> str | None:
    """Return the suffix of a quantised tensor's part; None: it is a plain one."""
    if name.endswith(format.scales_suffix):
        return format.scales_suffix
    if format.method == "mxfp4":
        return format.numbers_suffix if name.endswith(format.numbers_suffix) else None
    return format.numbers_suffix if tensor.dtype == torch.float8_e4m3fn else None


def _joined(
    name: str, numbers: torch.Tensor, scales: torch.Tensor, format: CheckpointFormat
) -> torch.Tensor:
    expected = format.scales_shape(tuple(numbers.shape))
    if expected != tuple(scales.shape):
        raise ValueError(
            f"{name}{format.scales_suffix} must have the shape {expected} ({format}), got "
            f"{tuple(scales.shape)}"
        )
    if format.method == "mxfp4":
        if numbers.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise ValueError(f"{name}: blocks and scales must be uint8 ({format})")
        if bool((scales == NO_NUMBER).any()):
            raise ValueError(f"{name}{format.scales_suffix} holds NaN")
        return from_mxfp4(numbers, scales)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(f"{name}{format.scales_suffix} holds numbers that are not finite")
    return from_fp8(numbers, scales, format.block)
