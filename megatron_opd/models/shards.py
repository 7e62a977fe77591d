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
from megatron_opd.models.tensors import qkv_parts, row_shapes


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
    if shard.row.fusion == "qkv":
        return _cut_qkv(shard, spec, source)
    if shard.row.fusion == "gate_up":
        half = shape[0] // 2
        full = (half * shard.count, *shape[1:])
        parts = [source.read(n, full, 0, shard.index * half, half) for n in shard.names]
        return torch.cat(parts)
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


def _cut_qkv(shard: Shard, spec: ModelSpec, source: TensorSource) -> torch.Tensor:
    """Read this rank's range of q, of k and of v, and lay them out by KV group."""
    parts = qkv_parts(spec, shard.index, shard.count)
    rest: dict[int, torch.Tensor] = {}
    for place, shape in enumerate(row_shapes(spec, shard.row)):
        mine = [(start, length) for at, start, length in parts if at == place]
        if mine:
            length = sum(length for _, length in mine)
            rest[place] = source.read(shard.names[place], shape, 0, mine[0][0], length)
    rows: list[torch.Tensor] = []
    for place, _, length in parts:
        rows.append(rest[place][:length])
        rest[place] = rest[place][length:]
    return torch.cat(rows)


def fuse(row: Row, spec: ModelSpec, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join Hugging Face tensors, in the order of `row.hf`, to the whole Megatron parameter."""
    if row.fusion == "qkv":
        return _interleaved(spec, tensors)
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


def _interleaved(spec: ModelSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Interleave rows of q, k and v (of any number of KV groups) as [q.., k, v] per group."""
    groups = len(parts[1]) // spec.head_dim
    tail = parts[0].shape[1:]
    by_group = [part.reshape(groups, -1, *tail) for part in parts]
    return torch.cat(by_group, dim=1).reshape(-1, *tail)


def join(row: Row, spec: ModelSpec, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Join all pieces, in shard order, to the Hugging Face tensors in the order of `row.hf`."""
    if row.fusion == "qkv":
        return _separated(spec, torch.cat(list(pieces)))
    if row.fusion == "gate_up":
        halves = zip(*(piece.chunk(2) for piece in pieces), strict=True)
        return [torch.cat(half) for half in halves]
    if row.vocab:
        whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        return [whole[: spec.vocab_size]]
    if row.dim is None or len(pieces) == 1:
        return [pieces[0]]
    return [torch.cat(list(pieces), dim=row.dim)]


def _separated(spec: ModelSpec, fused: torch.Tensor) -> list[torch.Tensor]:
    """Take q, k and v (of any number of KV groups) out of rows of [q.., k, v] per group."""
    tail = fused.shape[1:]
    ratio, size = spec.num_heads // spec.num_kv_heads, spec.head_dim
    by_group = fused.reshape(-1, (ratio + 2) * size, *tail)
    parts = by_group.split([ratio * size, size, size], dim=1)
    return [part.reshape(-1, *tail).contiguous() for part in parts]
