"""Holds Triton kernels of the lean log-prob operation: products whose results stay on the chip.

Two of them compute tiles of the logits x = hidden weight^T / temperature, [rows, ids], from
operands that are rows of H contiguous numbers, and keep what the loss needs of them. Values outside
the matrix are 0 in the operands and -inf in the logits. The other two serve the (row, id) pairs
that the loss asks for, which are few: a tile does nothing for them. Their number differs from batch
to batch, so no code is compiled for kinds of numbers (do_not_specialize). Sums are float32.

Axes: T rows, v ids of this rank, H hidden, N pairs, S parts of the vocabulary. A tile: M rows, K
ids. A program of pairs: P of them.
"""

# Types here are Triton's, and constants have capitals.
# ruff: noqa: ANN001, ANN201, ANN202
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e38)
"""Stands below every logit, and its difference from one is finite."""
PAIRS, DEPTH = 8, 256
"""Pairs whose logits one program makes, and numbers of H that it multiplies at a time."""
STORED = 128
"""Pairs whose gradients one program stores."""


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
def sums_kernel(
    hidden,
    weight,
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
    """Stores the sums of M rows over one part of the vocabulary."""
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


@triton.jit(do_not_specialize=["num_pairs"])
def chosen_kernel(
    hidden,
    weight,
    row_N,
    id_N,
    chosen_N,
    num_pairs,
    first_id,
    num_ids,
    width,
    temperature,
    P: tl.constexpr,
    H: tl.constexpr,
):
    """Stores x of P pairs; 0 for those whose id is another rank's. first_id: of this rank."""
    pair_P = tl.program_id(0) * P + tl.arange(0, P)
    is_pair_P = pair_P < num_pairs
    row_P = tl.load(row_N + pair_P, mask=is_pair_P, other=0)
    id_P = tl.load(id_N + pair_P, mask=is_pair_P, other=-1) - first_id
    is_here_P = (id_P >= 0) & (id_P < num_ids)
    hidden_P, weight_P = hidden + row_P[:, None] * width, weight + id_P[:, None] * width
    x_PH = tl.zeros((P, H), tl.float32)
    for first in range(0, width, H):
        at_H = first + tl.arange(0, H)
        is_there_PH = is_here_P[:, None] & (at_H < width)[None, :]
        left = tl.load(hidden_P + at_H[None, :], mask=is_there_PH, other=0.0)
        right = tl.load(weight_P + at_H[None, :], mask=is_there_PH, other=0.0)
        x_PH += left.to(tl.float32) * right.to(tl.float32)
    tl.store(chosen_N + pair_P, tl.sum(x_PH, 1) / temperature, mask=is_pair_P)


@triton.jit
def gradient_kernel(
    hidden,
    weight,
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
):
    """Stores one tile of the gradient of x as it is where no pair is: p (level - slope log p).

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
    to_MK = (
        row_M.to(tl.int64)[:, None] * stride
        + ((column - first_column) * K + tl.arange(0, K))[None, :]
    )
    is_there_MK = is_row_M[:, None] & (id_K < num_ids)[None, :]
    tl.store(grad_TC + to_MK, grad_MK.to(grad_TC.dtype.element_ty), mask=is_there_MK)


@triton.jit(do_not_specialize=["num_pairs", "first_id", "end_id"])
def pair_gradient_kernel(
    row_N,
    id_N,
    logp_N,
    total_N,
    level_T,
    slope_T,
    grad_TC,
    num_pairs,
    first_id,
    end_id,
    stride,
    P: tl.constexpr,
    SLOPE: tl.constexpr,
):
    """Stores the gradient of x at P pairs, over what gradient_kernel left there: total_N added.

    total_N: the same for pairs that are equal, so that it does not matter which of them is stored.
    grad_TC: as there, the ids from first_id to end_id; pairs with other ids are passed over.
    """
    pair_P = tl.program_id(0) * P + tl.arange(0, P)
    id_P = tl.load(id_N + pair_P, mask=pair_P < num_pairs, other=-1)
    is_here_P = (id_P >= first_id) & (id_P < end_id)
    row_P = tl.load(row_N + pair_P, mask=is_here_P, other=0)
    logp_P = tl.load(logp_N + pair_P, mask=is_here_P, other=0.0)
    factor_P = tl.load(level_T + row_P, mask=is_here_P, other=0.0)
    if SLOPE:
        factor_P -= tl.load(slope_T + row_P, mask=is_here_P, other=0.0) * logp_P
    total_P = tl.load(total_N + pair_P, mask=is_here_P, other=0.0)
    grad_P = (tl.exp(logp_P) * factor_P + total_P).to(grad_TC.dtype.element_ty)
    tl.store(grad_TC + row_P * stride + (id_P - first_id), grad_P, mask=is_here_P)
