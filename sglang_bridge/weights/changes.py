"""Finds what changed between two versions of a slice, bit by bit, and applies it.

A slice counts as flat numbers in blocks of BLOCK. Its changes are three arrays: how many numbers
changed in each block (int32), where in their blocks (uint16, ascending), and their new values. So
whoever holds a part of the slice reads the changes of its own blocks alone. Numbers are compared as
bits: -0.0 is not 0.0, and a NaN with the same bits has not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_bridge.weights.digest import BITS

BLOCK = 1 << 16
AT_ONCE = 64
"""Blocks that are looked at together."""
COUNT_BYTES, OFFSET_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class Changes:
    """Holds the changes of one slice. counts: [blocks]; offsets, values: [changed numbers]."""

    counts: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor


def find_changes(old: torch.Tensor, new: torch.Tensor) -> Changes | None:
    """Compare two slices of the same shape and dtype; both lie in one piece in host memory.

    None: their changes take no less room than `new` itself.
    """
    before, after = (t.view(-1).view(BITS[t.dtype.itemsize]) for t in (old, new))
    room = new.nbytes - COUNT_BYTES * num_blocks(new.numel())
    counts: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    step = AT_ONCE * BLOCK
    for first in range(0, new.numel(), step):
        differs = before[first : first + step] != after[first : first + step]
        found = differs.nonzero().view(-1)
        room -= len(found) * (OFFSET_BYTES + new.dtype.itemsize)
        if room <= 0:
            return None
        blocks = num_blocks(len(differs))
        counts.append(torch.bincount(found // BLOCK, minlength=blocks).to(torch.int32))
        places.append(found + first)
    where = torch.cat(places)
    offsets = (where % BLOCK).to(torch.uint16)
    return Changes(torch.cat(counts), offsets, new.view(-1)[where])


def num_blocks(numbers: int) -> int:
    """Return how many blocks so many numbers are."""
    return -(-numbers // BLOCK)


def groups_of_blocks(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (block, block after the last) for the blocks of numbers [first, end), a few at once."""
    last = num_blocks(end)
    for block in range(first // BLOCK, last, AT_ONCE):
        yield block, min(block + AT_ONCE, last)


def apply_changes(rows: torch.Tensor, first: int, block: int, changes: Changes) -> None:
    """Put the changes of some blocks into memory.

    rows: live memory, dimension of the cut first: numbers [first, first + numel) of the slice.
    block: the first block of `changes`; what of them lies beside `rows` is left out.
    """
    blocks = torch.arange(block, block + len(changes.counts))
    places = torch.repeat_interleave(blocks * BLOCK, changes.counts.long())
    places += changes.offsets.to(torch.int64) - first
    inside = (places >= 0) & (places < rows.numel())
    here, values = places[inside].to(rows.device), changes.values[inside].to(rows.device)
    if rows.dim() == 1:
        rows[here] = values
    else:
        rows[here // rows.shape[1], here % rows.shape[1]] = values
