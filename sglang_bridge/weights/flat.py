"""Reads the numbers of some views as if they lay end to end, in pieces of any length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


class Flat:
    """Holds a place in the numbers of `views`, each of which is asked for when it is reached."""

    def __init__(self, views: Iterable[torch.Tensor]) -> None:
        self._views = iter(views)
        self._view = torch.empty(0)
        self._at = 0

    def fill(self, numbers: torch.Tensor) -> None:
        """Copy the next numbers into `numbers`, a vector, cast to its dtype."""
        offset = 0
        for piece in self._next(numbers.numel()):
            numbers[offset : offset + piece.numel()].view(piece.shape).copy_(piece)
            offset += piece.numel()

    def _next(self, count: int) -> Iterator[torch.Tensor]:
        while count:
            if self._at == self._view.numel():
                self._view, self._at = next(self._views), 0
            length = min(count, self._view.numel() - self._at)
            yield from part(self._view, self._at, self._at + length)
            self._at += length
            count -= length


def part(view: torch.Tensor, first: int, end: int) -> Iterator[torch.Tensor]:
    """Yield views of the numbers [first, end) of `view`, counted row by row, in that order."""
    if (first, end) == (0, view.numel()):
        yield view
    elif view.is_contiguous() or view.dim() == 1:
        yield (view if view.dim() == 1 else view.view(-1))[first:end]
    else:
        size = view.numel() // view.shape[0]
        (top, skipped), (bottom, rest) = divmod(first, size), divmod(end, size)
        if top == bottom:
            yield from part(view[top], skipped, rest)
            return
        if skipped:
            yield from part(view[top], skipped, size)
            top += 1
        if top < bottom:
            yield view[top:bottom]
        if rest:
            yield from part(view[bottom], 0, rest)
