"""Decides which tokens of a packed micro-batch lie on which context-parallel rank.

Every segment is as long as a multiple of 2 * size and cut into 2 * size chunks; rank r holds chunks
r and 2 * size - 1 - r of each, so that every rank attends to as much as its peers. It is the layout
that TransformerEngine's packed attention expects.

Axes: S packed positions, s those of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


def share_of(lengths: Sequence[int], size: int, rank: int) -> np.ndarray:
    """Return the packed positions of `rank`, in its own order: int64 [S / size].

    lengths: tokens of the segments, each a multiple of 2 * size (any, for size 1).
    """
    if size == 1:
        return np.arange(sum(lengths))
    parts: list[np.ndarray] = []
    start = 0
    for length in lengths:
        chunk = length // (2 * size)
        assert chunk * 2 * size == length, f"segment of {length} tokens over {size} ranks"
        for index in (rank, 2 * size - 1 - rank):
            parts.append(np.arange(start + index * chunk, start + (index + 1) * chunk))
        start += length
    return np.concatenate(parts)


def packed_order(lengths: Sequence[int], size: int) -> np.ndarray:
    """Return [S]: where each packed position lies when ranks' shares are joined in rank order."""
    return np.argsort(np.concatenate([share_of(lengths, size, rank) for rank in range(size)]))


def whole_sequence(x_s: torch.Tensor, order_S: torch.Tensor) -> torch.Tensor:
    """Gather every rank's tokens in packed order, [s, ...] -> [S, ...]; gradients are summed."""
    group: Any = ps.get_context_parallel_group()
    joined = gather_from_sequence_parallel_region(
        x_s, tensor_parallel_output_grad=True, group=group
    )
    return joined.index_select(0, order_S)
