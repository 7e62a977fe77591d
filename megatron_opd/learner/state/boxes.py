"""Describes a range of a flattened tensor as boxes of the tensor. Torch-free.

The distributed optimizer gives every data-parallel rank a range of a flat buffer, wherever it ends
inside a parameter; a checkpoint knows boxes of whole tensors alone. A range that starts or ends
inside a row is cut there: at most two boxes a dimension, and one more for the whole rows between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """Covers elements offset..offset+size of a tensor; they are start..start+numel flattened."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.size)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements start..stop of a row-major tensor, in rising order.

    Each is contiguous in the flattened tensor, they do not overlap, and together they are the
    range. None for an empty range.
    """
    assert 0 <= start <= stop <= math.prod(shape), (shape, start, stop)
    if start == stop:
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,), start)
        return
    row = math.prod(shape[1:])
    first_whole, after_whole = -(-start // row), stop // row
    if first_whole > after_whole:  # inside one row
        yield from _in_row(shape, after_whole, start, stop)
        return
    yield from _in_row(shape, first_whole - 1, start, first_whole * row)
    if first_whole < after_whole:
        whole = (after_whole - first_whole, *shape[1:])
        yield Box((first_whole, *(0 for _ in shape[1:])), whole, first_whole * row)
    yield from _in_row(shape, after_whole, after_whole * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of start..stop, which lies in row `index`."""
    base = index * math.prod(shape[1:])
    for box in boxes(shape[1:], start - base, stop - base) if start < stop else ():
        yield Box((index, *box.offset), (1, *box.size), base + box.start)
