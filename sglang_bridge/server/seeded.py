"""Makes random numbers of a request and a position, the same on any server and in any batch.

What is drawn at a position is a function of the request's seed (SGLang's `sampling_seed`) and the
position alone: of the path on every server, of cached draws and a teacher's selection with
--enable-deterministic-inference. The numbers come from counter-based generators, which have no
state to lose. Draws: numpy's Philox 4x64, whose key is the seed and a stream, its counter the
position. The path takes a number for every id: on a CPU SplitMix64, vectorised over a step; on a
GPU SGLang's own (MurmurHash3) in a kernel.

Axes: B requests of a step, R rows of one request at consecutive positions, M numbers a row, V ids,
k blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from sglang_bridge.server.masses import kernels

DRAWS, SCORES = range(1, 3)
_WORDS = 4  # numbers a step of Philox's counter gives
_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64
_CACHED = 2**15  # numbers that stay in a core's cache


def row_uniforms(seed: int, stream: int, first: int, rows: int, columns: int) -> np.ndarray:
    """Returns float64 [R, M] in [0, 1): `columns` numbers at each position from `first` on."""
    steps = -(-columns // _WORDS)
    # As uint64 from the start: a list that holds 2^63 would become floats, and seeds equal.
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    counter = np.array([first * steps, 0, 0, 0], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=counter)
    return np.random.Generator(philox).random((rows, steps * _WORDS))[:, :columns]


def step_uniforms(
    seed_B: Sequence[int], stream: int, position_B: Sequence[int], columns_B: Sequence[int]
) -> np.ndarray:
    """Returns float64 [B, max M]: each request's numbers at its position; 0 beyond its own M."""
    uniform_BM = np.zeros((len(seed_B), max(columns_B, default=0)))
    for row, (seed, position, columns) in enumerate(
        zip(seed_B, position_B, columns_B, strict=True)
    ):
        uniform_BM[row, :columns] = row_uniforms(seed, stream, position, 1, columns)[0]
    return uniform_BM


def choose(probs_BV: torch.Tensor, seed_B: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
    """Returns int64 [B]: an id of each row of probs_BV, float32, which need not sum to 1.

    Every id i has an exponential variate E_i of its own, made from (seed, position, i); the largest
    p_i / E_i wins. This is the Gumbel-max draw. Two distributions that meet the same numbers choose
    the same id with probability at least (1 - TV) / (1 + TV), whatever the order of ids (inverse
    CDF has no such bound).
    """
    if probs_BV.is_cuda:
        return by_kernel(probs_BV, seed_B, position_B, kernels())
    rows, vocab = probs_BV.shape
    probs = probs_BV.numpy()
    key_B = _row_keys(seed_B.numpy(), position_B.numpy())
    steps_V = _GAMMA * np.arange(1, vocab + 1, dtype=np.uint64)
    block = max(1, _CACHED // vocab)
    found_B = np.empty(rows, np.int64)
    for start in range(0, rows, block):
        part = slice(start, start + block)
        score_bV = _log_uniforms(key_B[part, None] + steps_V)
        np.divide(probs[part], score_bV, out=score_bV)  # -p / E: the least wins
        found_B[part] = score_bV.argmin(1)
    return torch.from_numpy(found_B)


def by_kernel(
    probs_BV: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    module: ModuleType,
    tile: int | None = None,
) -> torch.Tensor:
    """Returns what SGLang's `multinomial_with_seed` chooses of probs_BV.log(), by `module`.

    That makes a float64 tensor [B, V]; the kernel makes two numbers a block. tile: numbers of a
    program, a power of 2; None: as many as suit a GPU.
    """
    (rows, vocab), numbers = probs_BV.shape, module.TILE if tile is None else tile
    assert probs_BV.dtype == torch.float32
    assert probs_BV.stride(1) == 1
    ids = min(numbers, 1 << (vocab - 1).bit_length())
    blocks = -(-vocab // ids)
    score_Bk = torch.empty((rows, blocks), dtype=torch.float64, device=probs_BV.device)
    id_Bk = torch.empty_like(score_Bk, dtype=torch.int64)
    if rows:
        module.seeded_kernel[(-(-rows // (numbers // ids)) * blocks,)](
            probs_BV, seed_B, position_B, score_Bk, id_Bk,
            rows, vocab, probs_BV.stride(0), blocks,
            ROWS=numbers // ids, IDS=ids,
        )  # fmt: skip
    return id_Bk.gather(1, score_Bk.argmax(1, keepdim=True))[:, 0]


def _row_keys(seed_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
    """Returns uint64 [B]: where the SplitMix64 sequence of each seed and position begins."""
    seed_key_B = _mixed(seed_B.astype(np.int64).view(np.uint64) + _GAMMA)
    return _mixed(seed_key_B + (position_B.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def _mixed(state: np.ndarray) -> np.ndarray:
    """Returns SplitMix64's output function of `state`, which is overwritten."""
    scratch = state >> np.uint64(30)
    state ^= scratch
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= np.right_shift(state, np.uint64(27), out=scratch)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= np.right_shift(state, np.uint64(31), out=scratch)
    return state


def _log_uniforms(state: np.ndarray) -> np.ndarray:
    """Returns float64 log u, u in (0, 1) from each counter; `state` is overwritten.

    Exact zero and one are never met: the uniform has 52 bits and lies between their multiples.
    """
    bits = _mixed(state)
    bits >>= np.uint64(12)
    bits |= np.uint64(0x3FF0000000000000)  # the bits of a float64 in [1, 2)
    uniform = bits.view(np.float64)
    uniform -= 1 - 2.0**-53
    return np.log(uniform, out=uniform)
