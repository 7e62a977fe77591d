"""Rounds weights as a low-precision sampler would hold them, to study the mismatch (TIS).

The matrices that such engines quantise (attention, MLP, experts) are rounded and written back in
their own type; embeddings, LM head, routers and norms stay exact. No memory is saved: servers that
hold quantised weights are those of `student.quantization` (weight_sync/quantised.py).
"""

from __future__ import annotations

import torch

from sglang_bridge.weights.formats import Grid, is_quantised
from sglang_bridge.weights.quantise import dequantised, quantised, row_maxima, row_scales


def rounded(
    name: str,
    tensor: torch.Tensor,
    grid: Grid | None,
    row_max: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `tensor` with every row on `grid`, if tensor `name` is one that has one.

    The grid's largest value is the row's largest magnitude: int8 has 255 equal steps, int4 15 and
    int3 7, fp8 (e4m3) three bits of mantissa. A row of zeros stays zeros. row_max: [rows, 1], the
    rows' largest magnitudes where `tensor` has only some of their columns.
    """
    if grid is None or not is_quantised(name, tensor.dim()):
        return tensor
    scales = row_scales(row_maxima(tensor) if row_max is None else row_max, grid)
    return dequantised(quantised(tensor, scales, grid), scales, tensor.dtype)
