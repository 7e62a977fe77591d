"""Names what quantised servers hold: which tensors, their scales, their bytes. Torch-free.

A matrix [rows, columns] of attention, an MLP or an expert is held as numbers of one byte and one
float32 scale for every row. Embeddings, LM head, routers, norms and biases stay as they are.
"""

from __future__ import annotations

from typing import Literal

Format = Literal["int8", "fp8"]
Grid = Literal["int8", "fp8", "int4", "int3"]
"""What weights can be rounded to: a format, or a coarser grid, which no server holds."""
HELD_AS: dict[str, str] = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""Names of torch's dtypes of the numbers, by format."""
SCALE_DTYPE = EXACT_DTYPE = "float32"

UNQUANTISED = ("embed_tokens.", "lm_head.", ".gate.", ".router.", ".shared_expert_gate.")
"""Parts of the names of matrices that are never quantised."""
MATRIX, SCALES_SUFFIX = ".weight", "_scale"

Kind = Literal["plain", "exact", "numbers", "scales"]
"""exact: not quantised, and float32 on servers of every dtype."""
PLAIN: Kind = "plain"
EXACT: Kind = "exact"
NUMBERS: Kind = "numbers"
SCALES: Kind = "scales"
PLAIN_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number of a tensor that is not quantised, by dtype."""


def is_quantised(name: str, dimensions: int) -> bool:
    """Return whether quantised servers hold tensor `name` as numbers and scales."""
    matrix = dimensions == 2 and name.endswith(MATRIX)
    return matrix and not any(part in name for part in UNQUANTISED)


def scales_of(name: str) -> str:
    """Return the name of the scales of matrix `name`: a tensor [rows, 1]."""
    return name + SCALES_SUFFIX


def item_bytes(dtype: str) -> dict[Kind, int]:
    """Return the bytes of a number of each kind, for servers of `dtype`."""
    return {PLAIN: PLAIN_BYTES[dtype], EXACT: 4, NUMBERS: 1, SCALES: 4}


def dtype_of(kind: Kind, dtype: str, format: Format | None) -> str:
    """Return torch's name of what tensors of `kind` are, on servers of `dtype` and `format`."""
    if kind == EXACT:
        return EXACT_DTYPE
    if kind == PLAIN or format is None:
        return dtype
    return HELD_AS[format] if kind == NUMBERS else SCALE_DTYPE
