"""Makes random numbers of a request and a position, the same on any server and in any batch.

With --enable-deterministic-inference every request has a seed (SGLang's `sampling_seed`), and what
is drawn at a position is a function of seed and position alone. The numbers come from a counter
based generator (numpy's Philox 4x64), which has no state to lose: its key is the seed and a stream,
its counter the position. Streams are independent, so that draws tell nothing of the path.

Axes: B requests of a step, R rows of one request at consecutive positions, M numbers a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_bridge.server.sampling import draw

PATH, DRAWS, SCORES = range(3)
_WORDS = 4  # numbers a step of Philox's counter gives


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


def choose(logp_BV: torch.Tensor, seed_B: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
    """Returns int64 [B, 1]: an id of each row, drawn by inverse CDF.

    SGLang's `multinomial_with_seed` (the same arguments) for a CPU, where its hash needs
    sgl_kernel.
    """
    ones = [1] * len(seed_B)
    uniform_B1 = step_uniforms(seed_B.tolist(), PATH, position_B.tolist(), ones)
    return draw(logp_BV.exp(), torch.from_numpy(uniform_B1))[0]
