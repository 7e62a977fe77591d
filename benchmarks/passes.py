"""Counts what torch's operations read and write, in passes over one matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FETCHES = ("gather", "index", "index_select", "scatter", "scatter_", "index_put_")
"""Touch as much of a large tensor as they are given places in it."""


class Passes(TorchDispatchMode):
    """Counts, while it is entered, what the operations on CPU or CUDA tensors move.

    matrix: what a pass goes over once. Views move nothing. Triton's kernels are not seen.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self._size, self._memory = matrix.numel(), matrix.untyped_storage().data_ptr()
        self._read = self._moved = self._largest = 0
        self.operations = 0

    @property
    def reads(self) -> float:
        """Passes over the matrix itself."""
        return self._read / self._size

    @property
    def moved(self) -> float:
        """All numbers read and written, over the matrix's."""
        return self._moved / self._size

    @property
    def largest(self) -> float:
        """Numbers of the largest tensor that was made, over the matrix's."""
        return self._largest / self._size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, and counts it."""
        out = func(*args, **(kwargs or {}))
        if any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            return out
        given, made = list(_tensors((args, kwargs))), list(_tensors(out))
        most = self._size
        if func._schema.name.removeprefix("aten::") in FETCHES:
            places = [t.numel() for t in given if t.dtype == torch.int64]
            most = min(most, max(*places, *(t.numel() for t in made if not _is_in(t, given)), 0))
        self.operations += 1
        for tensor in given:
            count = min(tensor.numel(), most) if most < self._size else tensor.numel()
            self._moved += count
            if tensor.untyped_storage().data_ptr() == self._memory:
                self._read += count
        for tensor in made:
            self._moved += min(tensor.numel(), most) if most < self._size else tensor.numel()
            if not _is_in(tensor, given):
                self._largest = max(self._largest, tensor.numel())
        return out


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _is_in(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    memory = tensor.untyped_storage().data_ptr()
    return any(memory == other.untyped_storage().data_ptr() for other in others)
