"""Cuts Megatron parameter shards out of Hugging Face tensors, and joins them back, bitwise.

Axes: H hidden features; rows of q, k, v are (head, head_dim).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from megatron_opd.models.families.family import EXPERT_BIAS, Row
from megatron_opd.models.families.keys import Key, hf_names, locate, row_of
from megatron_opd.models.ranks import RankPlacement
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import fused_parts, row_shapes, sections


class TensorSource(Protocol):
    """Provides full Hugging Face tensors, slice by slice."""

    def read(
        self, name: str, shape: tuple[int, ...], dim: int, start: int, length: int
    ) -> torch.Tensor:
        """Read [start, start + length) along `dim` of tensor `name`, of full size `shape`."""
        ...


@dataclass(frozen=True)
class Shard:
    """Describes this rank's piece `index` of `count` of a parameter of the whole model.

    Of a row that is a buffer, `parameter` is that buffer.
    """

    key: Key
    row: Row
    names: tuple[str, ...]
    parameter: torch.Tensor
    index: int
    count: int


Chunks = torch.nn.Module | Sequence[torch.nn.Module]


def local_shards(model: Chunks, spec: ModelSpec, world: RankPlacement) -> dict[Key, Shard]:
    """Return every parameter of this rank, by its key. model: its chunks, or the only one.

    KeyError: a parameter that the family's table lacks.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    expert_offset = world.ep_rank * (spec.num_experts // world.parallel.ep)
    shards: dict[Key, Shard] = {}
    for chunk in map(_unwrapped, chunks):
        layer_offset = _first_layer(chunk)
        for name, parameter in chain(chunk.named_parameters(), _buffers(chunk)):
            key = locate(spec.family, name, layer_offset, expert_offset)
            shards[key] = _shard(key, parameter, spec, world)
    return shards


def _buffers(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that belong to the model's weights, which no optimizer moves."""
    return ((name, held) for name, held in chunk.named_buffers() if name.endswith(EXPERT_BIAS))


def _shard(key: Key, parameter: torch.Tensor, spec: ModelSpec, world: RankPlacement) -> Shard:
    row = row_of(spec.family, key)
    index, count = world.tp_rank, world.parallel.tp
    if row.dim is None:
        index, count = 0, 1
    elif row.expert:
        index, count = world.expert_tp_rank, world.parallel.expert_tp
    names = hf_names(spec.family, key)
    if spec.tied and names == ("lm_head.weight",):
        names = ("model.embed_tokens.weight",)  # the last stage's copy of a shared weight
    return Shard(key, row, names, parameter, index, count)


def _unwrapped(chunk: Any) -> torch.nn.Module:
    """Return the GPTModel inside wrappers such as DistributedDataParallel."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module
    return chunk


def _first_layer(chunk: Any) -> int:
    """Return the global index of a GPTModel's first layer, as Megatron numbered it.

    Chunks of an interleaved pipeline and uneven stages are right without arithmetic of ours.
    """
    return min((layer.layer_number - 1 for layer in chunk.decoder.layers), default=0)


def cut(shard: Shard, spec: ModelSpec, source: TensorSource) -> torch.Tensor:
    """Read this rank's piece from full tensors."""
    shape = tuple(shard.parameter.shape)
    if shard.row.fusion != "none":
        return _cut_fused(shard, spec, source)
    if shard.row.vocab:
        return _cut_vocab(shard, spec, source, shape)
    dim = shard.row.dim or 0
    length = shape[dim]
    full = (*shape[:dim], length * shard.count, *shape[dim + 1 :])
    return source.read(shard.names[0], full, dim, shard.index * length, length)


def _cut_vocab(
    shard: Shard, spec: ModelSpec, source: TensorSource, shape: tuple[int, ...]
) -> torch.Tensor:
    """Read rows of the vocabulary; those that pad it are 0."""
    full = (spec.vocab_size, *shape[1:])
    start = min(shard.index * shape[0], spec.vocab_size)
    length = min(shape[0], spec.vocab_size - start)
    rows = source.read(shard.names[0], full, 0, start, length)
    return F.pad(rows, (0, 0, 0, shape[0] - length))


def _cut_fused(shard: Shard, spec: ModelSpec, source: TensorSource) -> torch.Tensor:
    """Read what this rank's rows hold of each tensor, from its first row to its last, in order."""
    parts = fused_parts(spec, shard.row, shard.index, shard.count)
    read: dict[int, tuple[int, torch.Tensor]] = {}
    for place, shape in enumerate(row_shapes(spec, shard.row)):
        mine = [(start, start + length) for at, start, length in parts if at == place]
        if mine:
            first, end = min(mine)[0], max(mine)[1]
            tensor = source.read(shard.names[place], shape, 0, first, end - first)
            read[place] = first, tensor
    return torch.cat(
        [read[place][1].narrow(0, start - read[place][0], length) for place, start, length in parts]
    )


def fuse(row: Row, spec: ModelSpec, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join Hugging Face tensors, in the order of `row.hf`, to the whole Megatron parameter."""
    if row.fusion == "none":
        return tensors[0]
    parts = fused_parts(spec, row, 0, 1)
    return torch.cat([tensors[place].narrow(0, start, length) for place, start, length in parts])


def join(row: Row, spec: ModelSpec, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Join all pieces, in shard order, to the Hugging Face tensors in the order of `row.hf`."""
    if row.fusion != "none":
        return _separated(row, spec, pieces)
    if row.vocab:
        whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        return [whole[: spec.vocab_size]]
    if row.dim is None or len(pieces) == 1:
        return [pieces[0]]
    return [torch.cat(list(pieces), dim=row.dim)]


def _separated(row: Row, spec: ModelSpec, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Take the Hugging Face tensors out of the pieces of a fused parameter."""
    found: list[list[tuple[int, torch.Tensor]]] = [[] for _ in row.hf]
    for index, piece in enumerate(pieces):
        parts = fused_parts(spec, row, index, len(pieces))
        rows = piece.split([length for _, _, length in parts])
        for (place, start, _), part in zip(parts, rows, strict=True):
            found[place].append((start, part))
    return [torch.cat([part for _, part in sorted(each, key=lambda at: at[0])]) for each in found]


def to_stored(row: Row, spec: ModelSpec, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a Megatron checkpoint holds of a parameter, without padding of the vocabulary."""
    stacked = sections(spec, row)
    if not stacked:
        return [fuse(row, spec, tensors)]
    return [tensors[each.place].narrow(0, each.start, each.length) for each in stacked]


def from_stored(row: Row, spec: ModelSpec, stored: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the Hugging Face tensors, in the order of `row.hf`, of what a checkpoint holds."""
    stacked = sections(spec, row)
    if not stacked:
        return join(row, spec, stored)
    parts: list[list[torch.Tensor]] = [[] for _ in row.hf]
    for section, tensor in zip(stacked, stored, strict=True):
        parts[section.place].append(tensor)
    return [each[0] if len(each) == 1 else torch.cat(each) for each in parts]
