"""Gathers full Hugging Face tensors out of a sharded model, one at a time, on rank 0.

Every rank walks the same list in the same order: the owners of a tensor's pieces send, rank 0
receives and joins, the others pass. At most one tensor is ever whole. The first rank that holds a
piece sends it; replicas stay silent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_opd.models.families.keys import Key, hf_names, row_of
from megatron_opd.models.ranks import RankPlacement, all_gather_json
from megatron_opd.models.shards import Chunks, Shard, join, local_shards
from megatron_opd.models.spec import ModelSpec


@dataclass(frozen=True)
class Entry:
    """Describes a parameter of the whole model. owners: its pieces' ranks. shape: of one piece."""

    key: Key
    owners: tuple[int, ...]
    shape: tuple[int, ...]


class FullTensors:
    """Provides the model as Hugging Face tensors. Building it is collective over the world.

    model: this rank's chunks, or its only one. dtype: of all but buffers, which are float32.
    """

    def __init__(self, model: Chunks, spec: ModelSpec, world: RankPlacement) -> None:
        self.spec, self.world = spec, world
        self.shards = local_shards(model, spec, world)
        self.dtype = next(s.parameter.dtype for s in self.shards.values() if not s.row.buffer)
        self.entries = self._agree()

    def _agree(self) -> list[Entry]:
        mine = [
            [k.layer, k.row, k.expert, s.index, s.count, list(s.parameter.shape)]
            for k, s in self.shards.items()
        ]
        found: dict[Key, tuple[list[int | None], tuple[int, ...]]] = {}
        for rank, theirs in enumerate(all_gather_json(mine, self.world)):
            for layer, row, expert, index, count, shape in theirs:
                owners, _ = found.setdefault(
                    Key(layer, row, expert), ([None] * count, tuple(shape))
                )
                if owners[index] is None:
                    owners[index] = rank
        entries: list[Entry] = []
        for key, (owners, shape) in sorted(found.items()):
            if self.spec.tied and hf_names(self.spec.family, key) == ("lm_head.weight",):
                continue  # the last stage's copy of the embedding
            known = tuple(owner for owner in owners if owner is not None)
            assert len(known) == len(owners), f"no rank holds every piece of {key}"
            entries.append(Entry(key, known, shape))
        return entries

    @torch.no_grad()
    def copied(self, dtype: torch.dtype | None = None) -> FullTensors:
        """Return the same tensors in memory of their own, as large as this rank's shards.

        dtype: of all but buffers; None: as they are.
        """
        other = copy.copy(self)
        if dtype is not None:
            other.dtype = dtype
        other.shards = {
            key: replace(shard, parameter=torch.nn.Parameter(_copy_of(shard, dtype), False))
            for key, shard in self.shards.items()
        }
        return other

    @torch.no_grad()
    def become(self, source: FullTensors) -> None:
        """Take over the values of `source`, of which this is a copy."""
        for key, shard in self.shards.items():
            shard.parameter.copy_(source.shards[key].parameter)

    def owned(self) -> Iterator[Shard]:
        """Yield those of this rank's shards that no rank before it holds too."""
        for entry in self.entries:
            shard = self.shards.get(entry.key)
            if shard is not None and entry.owners[shard.index] == self.world.rank:
                yield shard

    def manifest(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Return (name, full shape, dtype) of every tensor, in the order of `tensors`."""
        listed: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        for entry in self.entries:
            pieces = [torch.empty(entry.shape, device="meta") for _ in entry.owners]
            full = join(row_of(self.spec.family, entry.key), self.spec, pieces)
            names = hf_names(self.spec.family, entry.key)
            dtype = self._dtype_of(entry)
            listed += [(n, tuple(t.shape), dtype) for n, t in zip(names, full, strict=True)]
        return listed

    def _dtype_of(self, entry: Entry) -> torch.dtype:
        return torch.float32 if row_of(self.spec.family, entry.key).buffer else self.dtype

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) on rank 0, nothing elsewhere.

        Collective: every rank must exhaust it. The tensors may share memory with the parameters.
        """
        rank = self.world.rank
        for entry in self.entries:
            shard = self.shards.get(entry.key)
            if rank != 0:
                if rank in entry.owners:
                    assert shard is not None
                    _exchange(dist.isend, shard.parameter.detach().contiguous(), 0)
                continue
            pieces: list[torch.Tensor] = []
            for owner in entry.owners:
                if owner == 0:
                    assert shard is not None
                    pieces.append(shard.parameter.detach())
                    continue
                piece = torch.empty(
                    entry.shape, dtype=self._dtype_of(entry), device=self.world.device
                )
                _exchange(dist.irecv, piece, owner)
                pieces.append(piece)
            full = join(row_of(self.spec.family, entry.key), self.spec, pieces)
            yield from zip(hf_names(self.spec.family, entry.key), full, strict=True)


def _copy_of(shard: Shard, dtype: torch.dtype | None) -> torch.Tensor:
    kept = dtype is None or shard.row.buffer
    return shard.parameter.detach().to(shard.parameter.dtype if kept else dtype, copy=True)


def _exchange(way: Any, tensor: torch.Tensor, peer: int) -> None:
    """Send to a rank or receive from it, and wait.

    As a batch of one: NCCL then uses the world's communicator. Otherwise it makes one for every
    pair, so that rank 0 would end with as many as there are owners.
    """
    for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, peer)]):
        work.wait()
