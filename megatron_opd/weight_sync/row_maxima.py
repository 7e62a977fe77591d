"""Finds the largest magnitude of every row of matrices whose rows several ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_opd.models.families import hf_names, row_of
from megatron_opd.models.gather import FullTensors
from megatron_opd.weight_sync.rounding import Format, is_rounded, rounded
from sglang_bridge.weights.exchange import Read, as_it_is


def reader(full: FullTensors, format: Format | None) -> Read:
    """Return what reads a slice of a tensor as a sampler of precision `format` would hold it.

    Collective over the learner's world. A slice has whole rows, or all rows of some columns.
    """
    if format is None:
        return as_it_is
    maxima = row_maxima(full)

    def read(name: str, view: torch.Tensor) -> torch.Tensor:
        return rounded(name, view, format, maxima.get(name))

    return read


def row_maxima(full: FullTensors) -> dict[str, torch.Tensor]:
    """Return float32 [rows, 1] of every matrix that is rounded and cut along its columns.

    Collective over the learner's world; a rank keeps those of the tensors that it holds.
    """
    world, found = full.world, dict[str, torch.Tensor]()
    for entry in full.entries:
        (name, *_) = hf_names(full.spec.family, entry.key)
        if row_of(full.spec.family, entry.key).dim != 1 or not is_rounded(name, len(entry.shape)):
            continue
        shard = full.shards.get(entry.key)
        largest = torch.zeros(entry.shape[0], 1, device=world.device)
        if shard is not None:
            largest = shard.parameter.detach().float().abs().amax(dim=1, keepdim=True)
        if world.size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if shard is not None:
            found[name] = largest
    return found
