"""Quantises matrices row by row: numbers of one byte, and a float32 scale for every row.

Whoever makes them, a server that loads a checkpoint or a learner that sends weights, makes the same
bits: a row's scale follows from its largest magnitude alone, and a number from its weight and that
scale. So the columns of a matrix may lie on several ranks.
"""

from __future__ import annotations

import torch

from sglang_bridge.weights.formats import Grid

LARGEST = {"int8": 127.0, "fp8": torch.finfo(torch.float8_e4m3fn).max, "int4": 7.0, "int3": 3.0}
"""The number that stands for a row's largest magnitude."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scales are normal numbers, which no device flushes to zero; a row of zeros has this one."""


def row_maxima(matrix: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of every row, float32 [rows, 1]; NaN where a row has one."""
    low, high = torch.aminmax(matrix, dim=1, keepdim=True)
    return torch.maximum(-low, high).float()


def row_scales(row_max: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the scales of rows of these largest magnitudes, float32 [rows, 1]."""
    return (row_max.float() / LARGEST[grid]).clamp(min=SMALLEST_SCALE)


def quantised(matrix: torch.Tensor, scales: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the numbers nearest to matrix / scales: int8, or float8_e4m3fn."""
    largest = LARGEST[grid]
    steps = (matrix.float() / scales).clamp_(-largest, largest)
    return steps.to(torch.float8_e4m3fn) if grid == "fp8" else steps.round_().to(torch.int8)


def dequantised(
    numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the weights that numbers [..., rows, columns] and scales [..., rows, 1] stand for."""
    return numbers.float().mul_(scales).to(dtype)
