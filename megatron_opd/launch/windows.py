"""Finds room for one group of neighbouring GPUs: each function is a way of laying out.

Invariant: what is found are different GPUs of the node, in ascending order. `uses` counts the
processes of each GPU; a group starts no lower than the previous group of its part, at `start`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

Layout = Callable[[Sequence[int], int, int], tuple[int, ...] | None]


def in_blocks(uses: Sequence[int], size: int, start: int) -> tuple[int, ...] | None:
    """Find free neighbours within an aligned block, such as 0-1, 2-3, or 0-3, 4-7.

    GPUs of a block are near each other on most nodes (a PCIe switch, a NUMA node).
    """
    return next((w for w in _free(uses, size, start) if _in_block(w)), None)


def packed(uses: Sequence[int], size: int, start: int) -> tuple[int, ...] | None:
    """Find free neighbours, otherwise the lowest free GPUs, where named ones leave no others."""
    neighbours = next(_free(uses, size, start), None)
    if neighbours is not None:
        return neighbours
    free = tuple(islice((gpu for gpu, count in enumerate(uses) if count == 0), size))
    return free if len(free) == size else None


def least_used(uses: Sequence[int], size: int, start: int) -> tuple[int, ...] | None:
    """Find the neighbours with the fewest processes, in an aligned block if there are several."""
    windows = (tuple(range(first, first + size)) for first in range(len(uses) - size + 1))

    def crowding(window: tuple[int, ...]) -> tuple[int, int, bool]:
        counts = [uses[gpu] for gpu in window]
        return max(counts), sum(counts), not _in_block(window)

    return min(windows, key=crowding, default=None)


LAYOUTS: tuple[Layout, ...] = (in_blocks, packed)
"""Ways in which no GPU is shared, the best one first."""


def _free(uses: Sequence[int], size: int, start: int) -> Iterator[tuple[int, ...]]:
    run = 0  # free GPUs up to this one
    for gpu in range(start, len(uses)):
        run = 0 if uses[gpu] else run + 1
        if run >= size:
            yield tuple(range(gpu - size + 1, gpu + 1))


def _in_block(window: tuple[int, ...]) -> bool:
    """Return whether neighbours lie in one block of the next power of two of GPUs."""
    block = 1 << (len(window) - 1).bit_length()
    return window[0] // block == window[-1] // block
