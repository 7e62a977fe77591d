"""Holds Triton kernels: one sums blocks of ids and reads every logit once, one draws from blocks.

Axes: B rows, k blocks of a row, I ids of a block. A program has G blocks or D draws of one row.
"""

# Types here are Triton's, and constants have capitals.
# ruff: noqa: ANN001, ANN201
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

GROUP, DRAWS = 16, 8
"""Blocks that one program sums, and draws that one makes."""


@triton.jit
def block_sums_kernel(
    logits_BV,
    temperature_B,
    max_Bk,
    sum_Bk,
    vocab,
    blocks,
    programs,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Stores the largest logit of a block and the sum of exp((logit - largest) / temperature).

    A block of -inf alone sums to 0, and NaN stays NaN. programs: that share a row.
    """
    row = (tl.program_id(0) // programs).to(tl.int64)
    block_G = (tl.program_id(0) % programs) * GROUP + tl.arange(0, GROUP)
    id_GI = block_G[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x_GI = tl.load(logits_BV + row * vocab + id_GI, mask=id_GI < vocab, other=float("-inf"))
    x_GI = x_GI.to(tl.float32)
    max_G = tl.max(x_GI, 1)
    from_G = tl.where(max_G == float("-inf"), 0.0, max_G)
    share_GI = tl.exp((x_GI - from_G[:, None]) / tl.load(temperature_B + row))
    to_G = row * blocks + block_G
    tl.store(max_Bk + to_G, max_G, mask=block_G < blocks)
    tl.store(sum_Bk + to_G, tl.sum(share_GI, 1), mask=block_G < blocks)


@triton.jit
def draw_kernel(
    logits_BV,
    temperature_B,
    top_B,
    mass_Bk,
    edge_Bk,
    heaviest_B,
    uniform_BM,
    ids_BM,
    vocab,
    blocks,
    draws,
    programs,
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    """Stores the id of each of DRAWS numbers of one row; see inversion.draw.

    heaviest_B: the block that answers for one without mass. HALVINGS: 2^HALVINGS > blocks.
    """
    row = (tl.program_id(0) // programs).to(tl.int64)
    draw_D = (tl.program_id(0) % programs) * DRAWS + tl.arange(0, DRAWS)
    is_draw_D = draw_D < draws
    row_edges = edge_Bk + row * blocks
    uniform_D = tl.load(uniform_BM + row * draws + draw_D, mask=is_draw_D, other=0.0)
    target_D = uniform_D * tl.load(row_edges + blocks - 1)
    # the first block whose edge lies above the target is in [block, end]
    block_D = tl.zeros((DRAWS,), tl.int32)
    end_D = tl.zeros((DRAWS,), tl.int32) + (blocks - 1)
    for _ in range(HALVINGS):
        middle_D = (block_D + end_D) // 2
        is_above_D = tl.load(row_edges + middle_D) > target_D
        end_D = tl.where(is_above_D, middle_D, end_D)
        block_D = tl.where(is_above_D, block_D, tl.minimum(middle_D + 1, end_D))
    mass_D = tl.load(mass_Bk + row * blocks + block_D)
    block_D = tl.where(mass_D > 0, block_D, tl.load(heaviest_B + row).to(tl.int32))
    mass_D = tl.load(mass_Bk + row * blocks + block_D).to(tl.float64)
    part_D = (target_D - (tl.load(row_edges + block_D) - mass_D)) / mass_D
    start_D = tl.minimum(block_D * BLOCK, vocab - BLOCK)
    column_I = tl.arange(0, BLOCK)
    id_DI = start_D[:, None] + column_I[None, :]
    x_DI = tl.load(logits_BV + row * vocab + id_DI).to(tl.float32)
    x_DI = tl.where(id_DI < block_D[:, None] * BLOCK, float("-inf"), x_DI)
    share_DI = tl.exp((x_DI - tl.load(top_B + row)) / tl.load(temperature_B + row))
    inner_DI = tl.cumsum(share_DI.to(tl.float64), 1)
    wanted_D = part_D * tl.max(inner_DI, 1)
    is_past_DI = (inner_DI > wanted_D[:, None]) & (share_DI > 0)
    first_D = tl.min(tl.where(is_past_DI, column_I[None, :], BLOCK), 1)
    found_D = tl.where(first_D < BLOCK, first_D, tl.argmax(x_DI, 1))
    tl.store(ids_BM + row * draws + draw_D, (start_D + found_D).to(tl.int64), mask=is_draw_D)
