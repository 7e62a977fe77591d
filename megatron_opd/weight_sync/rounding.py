"""Rounds weights as a low-precision sampler would hold them, to study the mismatch (TIS).

The matrices that such engines quantise (attention, MLP, experts) are rounded and written back in
their own type; embeddings, LM head, routers and norms stay exact.
"""

from __future__ import annotations

from typing import Literal

import torch

EXACT = ("embed_tokens.", "lm_head.", ".gate.")
INT8_MAX = 127.0
FP8 = torch.float8_e4m3fn

Format = Literal["int8", "fp8"]


def is_rounded(name: str, dimensions: int) -> bool:
    """Return whether such engines quantise tensor `name`."""
    return dimensions == 2 and not any(part in name for part in EXACT)


def rounded(
    name: str,
    tensor: torch.Tensor,
    format: Format | None,
    row_max: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `tensor` with every row on the grid of `format`, if tensor `name` has one.

    The grid's largest value is the row's largest magnitude: int8 has 255 equal steps, fp8 (e4m3)
    three bits of mantissa. A row of zeros stays zeros. row_max: [rows, 1], the rows' largest
    magnitudes where `tensor` has only some of their columns.
    """
    if format is None or not is_rounded(name, tensor.dim()):
        return tensor
    wide = tensor.float()
    if row_max is None:
        row_max = wide.abs().amax(dim=1, keepdim=True)
    largest = INT8_MAX if format == "int8" else torch.finfo(FP8).max
    scale = row_max.clamp(min=torch.finfo(wide.dtype).tiny) / largest
    steps = (wide / scale).clamp(-largest, largest)
    held = steps.round() if format == "int8" else steps.to(FP8).float()
    return (held * scale).to(tensor.dtype)
