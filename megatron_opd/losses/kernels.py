"""Holds Triton kernels of the lean log-prob operation: products whose results stay on the chip.

Each program computes tiles of the logits x = hidden weight^T / temperature, [rows, ids], from
operands that are rows of H contiguous numbers, and keeps what the loss needs of them. Values
outside the matrix are 0 in the operands and -inf in the logits. Sums are float32.

Axes: T rows, v ids of this rank, H hidden, N (row, id) pairs sorted by tile (tiles.py), S parts of
the vocabulary. A tile: M rows, K ids.
"""

# Types here are Triton's, and constants have capitals.
# ruff: noqa: ANN001, ANN201, ANN202
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e38)
"""Stands below every logit, and its difference from one is finite."""


@triton.jit
def _tile(
    hidden,
    weight,
    row_M,
    id_K,
    num_rows,
    num_ids,
    width,
    temperature,
    M: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Computes the logits of rows and ids; -inf for an id that is none.

    EVEN: width is a multiple of H. EXACT: float32 operands are multiplied as such, not as TF32.
    WIDEN: operands become float32 first, which Triton's interpreter needs for bfloat16.
    """
    hidden_M = hidden + row_M.to(tl.int64)[:, None] * width
    weight_K = weight + id_K.to(tl.int64)[None, :] * width
    is_row_M, is_id_K = row_M < num_rows, id_K < num_ids
    x_MK = tl.zeros((M, K), tl.float32)
    for first in range(0, width, H):
        at_H = first + tl.arange(0, H)
        if EVEN:
            left = tl.load(hidden_M + at_H[None, :], mask=is_row_M[:, None], other=0.0)
            right = tl.load(weight_K + at_H[:, None], mask=is_id_K[None, :], other=0.0)
        else:
            in_H = at_H < width
            left = tl.load(
                hidden_M + at_H[None, :], mask=is_row_M[:, None] & in_H[None, :], other=0.0
            )
            right = tl.load(
                weight_K + at_H[:, None], mask=is_id_K[None, :] & in_H[:, None], other=0.0
            )
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        if EXACT:
            x_MK = tl.dot(left, right, x_MK, input_precision="ieee")
        else:
            x_MK = tl.dot(left, right, x_MK)
    return tl.where(is_id_K[None, :], x_MK / temperature, float("-inf"))


@triton.jit
def _place(across, columns, GROUP: tl.constexpr):
    """Returns the row tile and the column of this program, in a grid of across x columns.

    Programs that run at the same time share GROUP row tiles, so that operands stay in cache.
    """
    number = tl.program_id(0)
    group = number // (GROUP * columns)
    members = min(GROUP, across - group * GROUP)
    within = number - group * GROUP * columns
    return group * GROUP + within % members, within // members


@triton.jit
def _at(row_M, id_K, row_N, id_N, pair):
    """Returns where in a tile a pair is."""
    is_row_M, is_id_K = row_M == tl.load(row_N + pair), id_K == tl.load(id_N + pair)
    return is_row_M[:, None] & is_id_K[None, :]


@triton.jit
def sums_kernel(
    hidden,
    weight,
    bounds,
    place_N,
    row_N,
    id_N,
    chosen_N,
    max_ST,
    sum_ST,
    moment_ST,
    num_rows,
    num_ids,
    width,
    temperature,
    across,
    down,
    parts,
    tiles_a_part,
    M: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT: tl.constexpr,
    WIDEN: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Adds one part of the vocabulary to sums of M rows, and stores x of every pair in it."""
    row_tile, part = _place(across, parts, GROUP)
    row_M = row_tile * M + tl.arange(0, M)
    max_M = tl.full((M,), LOWEST, tl.float32)
    sum_M = tl.zeros((M,), tl.float32)
    moment_M = tl.zeros((M,), tl.float32)
    for column in range(part * tiles_a_part, min((part + 1) * tiles_a_part, down)):
        id_K = column * K + tl.arange(0, K)
        x_MK = _tile(
            hidden, weight, row_M, id_K, num_rows, num_ids, width, temperature,
            M, K, H, EVEN, EXACT, WIDEN,
        )  # fmt: skip
        tile = column * across + row_tile
        for pair in range(tl.load(bounds + tile), tl.load(bounds + tile + 1)):
            here_MK = _at(row_M, id_K, row_N, id_N, pair)
            tl.store(
                chosen_N + tl.load(place_N + pair), tl.sum(tl.sum(tl.where(here_MK, x_MK, 0.0), 1))
            )
        above_M = tl.maximum(max_M, tl.max(x_MK, 1))
        down_M = max_M - above_M
        shrink_M = tl.exp(down_M)
        below_MK = x_MK - above_M[:, None]
        exp_MK = tl.exp(below_MK)
        if ENTROPY:
            below_MK = tl.where((id_K < num_ids)[None, :], below_MK, 0.0)
            moment_M = shrink_M * (moment_M + sum_M * down_M) + tl.sum(exp_MK * below_MK, 1)
        sum_M = shrink_M * sum_M + tl.sum(exp_MK, 1)
        max_M = above_M
    to_M = part.to(tl.int64) * num_rows + row_M
    tl.store(max_ST + to_M, max_M, mask=row_M < num_rows)
    tl.store(sum_ST + to_M, sum_M, mask=row_M < num_rows)
    if ENTROPY:
        tl.store(moment_ST + to_M, moment_M, mask=row_M < num_rows)


@triton.jit
def gradient_kernel(
    hidden,
    weight,
    bounds,
    place_N,
    row_N,
    id_N,
    pair_N,
    normaliser_T,
    level_T,
    slope_T,
    grad_TC,
    num_rows,
    num_ids,
    width,
    temperature,
    across,
    first_column,
    columns,
    stride,
    M: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT: tl.constexpr,
    WIDEN: tl.constexpr,
    SLOPE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Stores one tile of the gradient of x: p (level - slope log p), and pair_N added at pairs.

    grad_TC: rows of `stride` numbers, the ids from tile `first_column` on.
    """
    row_tile, column = _place(across, columns, GROUP)
    column += first_column
    row_M, id_K = row_tile * M + tl.arange(0, M), column * K + tl.arange(0, K)
    x_MK = _tile(
        hidden, weight, row_M, id_K, num_rows, num_ids, width, temperature,
        M, K, H, EVEN, EXACT, WIDEN,
    )  # fmt: skip
    is_row_M = row_M < num_rows
    logp_MK = x_MK - tl.load(normaliser_T + row_M, mask=is_row_M, other=0.0)[:, None]
    level_M = tl.load(level_T + row_M, mask=is_row_M, other=0.0)
    grad_MK = tl.exp(logp_MK)
    if SLOPE:
        slope_M = tl.load(slope_T + row_M, mask=is_row_M, other=0.0)
        logp_MK = tl.where((id_K < num_ids)[None, :], logp_MK, 0.0)
        grad_MK *= level_M[:, None] - slope_M[:, None] * logp_MK
    else:
        grad_MK *= level_M[:, None]
    if PAIRS:
        tile = column * across + row_tile
        for pair in range(tl.load(bounds + tile), tl.load(bounds + tile + 1)):
            here_MK = _at(row_M, id_K, row_N, id_N, pair)
            grad_MK += tl.where(here_MK, tl.load(pair_N + tl.load(place_N + pair)), 0.0)
    to_MK = (
        row_M.to(tl.int64)[:, None] * stride
        + ((column - first_column) * K + tl.arange(0, K))[None, :]
    )
    is_there_MK = is_row_M[:, None] & (id_K < num_ids)[None, :]
    tl.store(grad_TC + to_MK, grad_MK.to(grad_TC.dtype.element_ty), mask=is_there_MK)
