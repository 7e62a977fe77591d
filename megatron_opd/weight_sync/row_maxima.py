"""Finds the largest magnitude of every row of matrices whose rows several ranks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_opd.models.families.keys import hf_names, row_of
from megatron_opd.models.gather import Entry, FullTensors
from megatron_opd.weight_sync.rounding import rounded
from sglang_bridge.weights import quantise
from sglang_bridge.weights.exchange import Read, as_it_is
from sglang_bridge.weights.formats import Grid, is_quantised

ROWS_AT_ONCE = 1 << 20
"""Rows whose maxima are reduced at once: 4 MB, where a reduction costs its bytes."""


def reader(full: FullTensors, grid: Grid | None) -> Read:
    """Return what reads a slice of a tensor as a sampler of that precision would hold it.

    Collective over the learner's world. A slice has whole rows, or all rows of some columns.
    """
    if grid is None:
        return as_it_is
    maxima = row_maxima(full)

    def read(name: str, view: torch.Tensor) -> torch.Tensor:
        return rounded(name, view, grid, maxima.get(name))

    return read


def row_maxima(full: FullTensors) -> dict[str, torch.Tensor]:
    """Return float32 [rows, 1] of every matrix that is quantised and cut along its columns.

    Collective over the learner's world; a rank keeps those of the tensors that it holds.
    """
    found: dict[str, torch.Tensor] = {}
    batch: list[Entry] = []
    for entry in full.entries:
        if _is_cut_along_columns(full, entry):
            batch.append(entry)
            if sum(other.shape[0] for other in batch) >= ROWS_AT_ONCE:
                found |= _maxima_of(full, batch)
                batch = []
    return found | _maxima_of(full, batch)


def _is_cut_along_columns(full: FullTensors, entry: Entry) -> bool:
    name = hf_names(full.spec.family, entry.key)[0]
    return row_of(full.spec.family, entry.key).dim == 1 and is_quantised(name, len(entry.shape))


def _maxima_of(full: FullTensors, batch: Sequence[Entry]) -> dict[str, torch.Tensor]:
    """Return the maxima of some matrices, by one reduction over all ranks."""
    rows = [entry.shape[0] for entry in batch]
    largest = torch.zeros(sum(rows), 1, device=full.world.device)
    shards = [full.shards.get(entry.key) for entry in batch]
    for shard, part in zip(shards, largest.split(rows), strict=True):
        if shard is not None:
            part.copy_(quantise.row_maxima(shard.parameter.detach()))
    if full.world.size > 1 and batch:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return {
        hf_names(full.spec.family, entry.key)[0]: part
        for entry, shard, part in zip(batch, shards, largest.split(rows), strict=True)
        if shard is not None
    }
