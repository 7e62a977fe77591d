"""Holds Triton kernels: one sums blocks of ids and reads every logit once, one draws from blocks.

A third makes the seeded draw of the path. Axes: B rows, k blocks of a row, I ids of a block. A
program has G blocks or D draws of one row; of the seeded draw a block of each of R rows.
"""

# Types here are Triton's, and constants have capitals.
# ruff: noqa: ANN001, ANN201, ANN202
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

GROUP, DRAWS = 16, 8
"""Blocks that one program sums, and draws that one makes."""
TILE = 1024
"""Numbers of the seeded draw that one program makes; a power of 2."""
RECIPROCAL = tl.constexpr(1 / (2**32 - 1))
LOWEST, HIGHEST = tl.constexpr(-1.7976931348623157e308), tl.constexpr(-(2.0**-32))
"""Ends to which SGLang clamps log u; float64's lowest number, and the spacing of u."""


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


@triton.jit
def _mixed(state, word):
    """Returns MurmurHash3's state after one more word; both uint32."""
    word *= 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state ^= word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit
def _finished(state):
    """Returns MurmurHash3 of the four words that made this state."""
    state ^= 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit(do_not_specialize=["rows"])
def seeded_kernel(
    probs_BV,
    seed_B,
    position_B,
    score_Bk,
    id_Bk,
    rows,
    vocab,
    stride,
    blocks,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
):
    """Stores the largest score of a block of IDS ids of ROWS rows, and the first id that has it.

    A score is log p - log(-log u), of a hash u of seed, position and id; as in torch.argmax a NaN
    is above all. float64, but log p: what `multinomial_with_seed` computes of p.log(). stride: from
    one row of probs_BV to the next.
    """
    row_R = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) % blocks
    id_1I = (block * IDS + tl.arange(0, IDS))[None, :]
    is_row_R = row_R < rows
    seed_R = tl.load(seed_B + row_R, mask=is_row_R, other=0).to(tl.uint64)
    position_R = tl.load(position_B + row_R, mask=is_row_R, other=0).to(tl.uint32)
    state_R = _mixed(tl.zeros((ROWS,), tl.uint32), (seed_R & 0xFFFFFFFF).to(tl.uint32))
    state_R = _mixed(_mixed(state_R, (seed_R >> 32).to(tl.uint32)), position_R)
    hash_RI = _finished(_mixed(state_R[:, None], id_1I.to(tl.uint32)))
    log_u_RI = tl.log(hash_RI.to(tl.float64) * RECIPROCAL)
    log_u_RI = tl.minimum(tl.maximum(log_u_RI, LOWEST), HIGHEST)
    is_there_RI = is_row_R[:, None] & (id_1I < vocab)
    p_RI = tl.load(probs_BV + row_R[:, None] * stride + id_1I, mask=is_there_RI, other=0.0)
    score_RI = tl.log(p_RI).to(tl.float64) - tl.log(-log_u_RI)
    is_nan_RI = score_RI != score_RI
    first_nan_R1 = tl.min(tl.where(is_nan_RI, id_1I, vocab), 1, keep_dims=True)
    score_R1 = tl.max(tl.where(is_nan_RI, float("-inf"), score_RI), 1, keep_dims=True)
    first_R1 = tl.min(tl.where(score_RI == score_R1, id_1I, vocab), 1, keep_dims=True)
    has_nan_R1 = first_nan_R1 < vocab
    to_R1 = row_R[:, None] * blocks + block
    score_R1 = tl.where(has_nan_R1, float("nan"), score_R1)
    first_R1 = tl.where(has_nan_R1, first_nan_R1, first_R1)
    tl.store(score_Bk + to_R1, score_R1, mask=is_row_R[:, None])
    tl.store(id_Bk + to_R1, first_R1.to(tl.int64), mask=is_row_R[:, None])
