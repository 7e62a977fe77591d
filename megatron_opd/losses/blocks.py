"""Splits logits into blocks, says which (row, id) pairs each holds, and makes their products.

Axes: T rows, N (row, id) pairs, H hidden, v this rank's slice of the vocabulary. One block: C rows,
K ids, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_opd.losses.passes import HeadSlice

# Blocks [C, K] of float32 logits. CPU: 8 MiB, so that the passes over a block stay in cache while
# the products are still large; a quarter of it costs 5%. Otherwise: 128 MiB, and matrix products as
# tall as they can be.
CPU_BLOCK_ROWS, CPU_BLOCK_IDS = 2048, 1024
BLOCK_ROWS, BLOCK_ELEMENTS = 16_384, 2**25


@dataclass(frozen=True)
class Block:
    """Describes a block: rows x ids (local to this rank), its pairs' place in N, row and column."""

    rows: slice
    ids: slice
    pair_P: torch.Tensor
    row_P: torch.Tensor
    column_P: torch.Tensor


@dataclass(frozen=True)
class BlockPlan:
    """Plans all blocks of T x v and their pairs: pairs sorted by block, cut at `bounds`.

    num_ids: ids of this rank; fewer than v where the vocabulary is padded to its ranks.
    """

    num_rows: int
    num_ids: int
    block_rows: int
    block_ids: int
    pair_P: torch.Tensor
    row_P: torch.Tensor
    id_P: torch.Tensor
    bounds: tuple[int, ...]

    @staticmethod
    def of(
        num_rows: int,
        head: HeadSlice,
        block: tuple[int, int],
        row_N: torch.Tensor,
        id_N: torch.Tensor,
    ) -> BlockPlan:
        """Plan the pairs whose ids this rank holds.

        IndexError for a pair outside the whole [T, V]. Waits for the device once: for the bounds,
        and for whether there is such a pair.
        """
        (block_rows, block_ids), num_ids = block, head.num_ids
        across, down = -(-num_rows // block_rows), -(-num_ids // block_ids)
        outside_N = (row_N < 0) | (row_N >= num_rows) | (id_N < 0) | (id_N >= head.total)
        local_N = id_N - head.first_id
        here_N = (local_N >= 0) & (local_N < num_ids)
        block_N = local_N // block_ids * across + row_N // block_rows
        # behind the last block: those of other ranks
        block_N, order_N = block_N.where(here_N, across * down).sort(stable=True)
        edges = torch.arange(across * down + 1, device=block_N.device)
        found = torch.cat([torch.searchsorted(block_N, edges), outside_N.any()[None].long()])
        *bounds, outside = found.tolist()
        if outside:
            row, token = int(row_N[outside_N][0]), int(id_N[outside_N][0])
            whole = f"[{num_rows}, {head.total}]"
            raise IndexError(f"(row, id) must lie in {whole} logits, got ({row}, {token})")
        pair_P = order_N[: bounds[-1]]
        pairs = pair_P, row_N[pair_P], local_N[pair_P]
        return BlockPlan(num_rows, num_ids, block_rows, block_ids, *pairs, tuple(bounds))

    def columns(self) -> Iterator[tuple[slice, Iterator[Block]]]:
        """Yield the blocks by slice of the vocabulary, so that weight gradients finish by slice."""
        across = -(-self.num_rows // self.block_rows)
        for column, first in enumerate(range(0, self.num_ids, self.block_ids)):
            ids = slice(first, min(first + self.block_ids, self.num_ids))
            yield ids, self._column(ids, column * across)

    def _column(self, ids: slice, number: int) -> Iterator[Block]:
        for first in range(0, self.num_rows, self.block_rows):
            rows = slice(first, min(first + self.block_rows, self.num_rows))
            pairs = slice(self.bounds[number], self.bounds[number + 1])
            row_P, column_P = self.row_P[pairs] - rows.start, self.id_P[pairs] - ids.start
            yield Block(rows, ids, self.pair_P[pairs], row_P, column_P)
            number += 1


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums over the vocabulary of `dtype` inputs are held."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Products:
    """Multiplies matrices, accumulated in `wide`, with two buffers that every block reuses.

    Half-precision operands are multiplied as they are where the device returns float32 from that
    (CUDA), else widened a block at a time.
    """

    def __init__(self, like: torch.Tensor, plan: BlockPlan) -> None:
        self.wide = wide_dtype(like.dtype)
        self.native_half = like.is_cuda and like.dtype != self.wide
        size = min(plan.block_rows, plan.num_rows) * min(plan.block_ids, plan.num_ids)
        self._buffers = [like.new_empty(size, dtype=self.wide) for _ in range(2)]

    def operand(self, block: torch.Tensor) -> torch.Tensor:
        """Return a block of inputs in the form that the products take."""
        return block if self.native_half else block.to(self.wide)

    def buffer_CK(self, which: int, block: Block) -> torch.Tensor:
        """Return a buffer of the block's shape, with arbitrary contents."""
        shape = block.rows.stop - block.rows.start, block.ids.stop - block.ids.start
        return self._buffers[which][: shape[0] * shape[1]].view(shape)

    def logits_CK(
        self, hidden_CH: torch.Tensor, weight_KH: torch.Tensor, temperature: float, block: Block
    ) -> torch.Tensor:
        """Compute the logits hidden weight^T / temperature, in buffer 0."""
        x_CK = self.buffer_CK(0, block)
        if self.native_half:
            torch.mm(hidden_CH, weight_KH.T, out_dtype=self.wide, out=x_CK)  # type: ignore[call-overload]
        else:
            torch.mm(hidden_CH, weight_KH.T, out=x_CK)
        return x_CK if temperature == 1 else x_CK.div_(temperature)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right, accumulated in float32 or wider, to `total` in place."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.dtype.itemsize < left.dtype.itemsize:
        total += left @ right
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def default_block(hidden_TH: torch.Tensor) -> tuple[int, int]:
    """Return rows x ids of a block, for this device and number of rows."""
    if hidden_TH.device.type == "cpu":
        return CPU_BLOCK_ROWS, CPU_BLOCK_IDS
    rows = max(1, min(len(hidden_TH), BLOCK_ROWS))
    return rows, BLOCK_ELEMENTS // rows
