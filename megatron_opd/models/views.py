"""Shows what a Megatron rank holds as slices of Hugging Face tensors, without copying.

A fused parameter is several slices: of q, k and v one for each KV group, as they interleave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from megatron_opd.models.shards import Shard
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import fused_parts


@dataclass(frozen=True, slots=True)
class View:
    """Describes live memory: [start, start + length) of dimension `dim` of tensor `name`."""

    name: str
    dim: int
    start: int
    tensor: torch.Tensor

    @property
    def length(self) -> int:
        """Returns the indices of its dimension that it holds."""
        return self.tensor.shape[self.dim]

    def cut(self, start: int, length: int) -> View | None:
        """Return what it holds of [start, start + length), counted in the whole; None: nothing."""
        first, end = max(start, self.start), min(start + length, self.start + self.length)
        if first >= end:
            return None
        part = self.tensor.narrow(self.dim, first - self.start, end - first)
        return View(self.name, self.dim, first, part)


def views_by_name(shards: Iterable[Shard], spec: ModelSpec) -> dict[str, list[View]]:
    """Return what the shards hold, by Hugging Face name, each tensor's slices in order."""
    found: dict[str, list[View]] = {}
    for shard in shards:
        for view in shard_views(shard, spec):
            found.setdefault(view.name, []).append(view)
    return found


def shard_views(shard: Shard, spec: ModelSpec) -> Iterator[View]:
    """Yield a shard's slices, those of one tensor in order; rows that pad the vocabulary not."""
    whole, row = shard.parameter.detach(), shard.row
    if row.fusion != "none":
        yield from _fused(shard, spec, whole)
    elif row.vocab:
        start = shard.index * len(whole)
        rows = max(0, min(len(whole), spec.vocab_size - start))
        yield View(shard.names[0], 0, start, whole[:rows])
    else:
        dim = row.dim or 0
        yield View(shard.names[0], dim, shard.index * whole.shape[dim], whole)


def _fused(shard: Shard, spec: ModelSpec, whole: torch.Tensor) -> Iterator[View]:
    """Yield the rows of each tensor that are fused here, each tensor's in its own order."""
    parts = fused_parts(spec, shard.row, shard.index, shard.count)
    offsets = accumulate((length for _, _, length in parts), initial=0)
    in_order = sorted(zip(parts, offsets, strict=False))  # an offset more, the end
    for (place, start, length), offset in in_order:
        yield View(shard.names[place], 0, start, whole.narrow(0, offset, length))
