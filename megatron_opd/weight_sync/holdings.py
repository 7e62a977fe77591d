"""Says which rank holds which part of which Hugging Face tensor, for a learner and for a server.

Both follow from config.json and the layouts alone, so that a plan can be made, and printed, before
anything runs. Torch-free. Rank order is Megatron's, see sizing/layout.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.families.family import KEY_NORM, QK_NORM, Row
from megatron_opd.models.families.keys import Key, hf_names, row_of
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import Shape, fused_parts, model_keys, row_shapes
from megatron_opd.sizing.layout import dense_axes, expert_axes, groups_along, stage_layers
from sglang_bridge.weights.formats import (
    EXACT,
    NUMBERS,
    PLAIN,
    SCALES,
    Format,
    Kind,
    is_quantised,
    scales_of,
)

SGLANG_VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this before it splits it over ranks."""


@dataclass(frozen=True, slots=True)
class Held:
    """Says that every rank of `ranks` holds [start, start + length) of dimension `dim` of `name`.

    shape: of the whole tensor. The part is whole in every other dimension. kind: see
    sglang_bridge/weights/formats.py.
    """

    name: str
    shape: Shape
    dim: int
    start: int
    length: int
    ranks: tuple[int, ...]
    kind: Kind = PLAIN

    @property
    def elements(self) -> int:
        """Returns how many numbers the part is."""
        return self.length * (math.prod(self.shape) // self.shape[self.dim])

    @property
    def is_whole(self) -> bool:
        """Returns whether the part is the whole tensor, so that `dim` says nothing."""
        return self.length == self.shape[self.dim]


def learner_holdings(
    spec: ModelSpec, parallel: ParallelConfig, fields: Mapping[str, Any] | None = None
) -> Iterator[Held]:
    """Yield what the learner's ranks hold, in the order of models.tensors.model_keys.

    fields: learner.megatron, for uneven pipeline stages. Padding of the vocabulary is left out.
    """
    ranks = _LearnerRanks(parallel)
    stage_of = {
        layer: stage
        for stage, chunks in enumerate(stage_layers(spec, parallel, fields))
        for chunk in chunks
        for layer in chunk
    }
    for key in model_keys(spec):
        row = row_of(spec.family, key)
        stages = _stages(spec, parallel, key, row, stage_of)
        if row.expert:
            count, owner = parallel.expert_tp, key.expert // (spec.num_experts // parallel.ep)
            holders = [ranks.of_experts(owner, index, stages) for index in range(count)]
        elif row.dim is None:
            everyone = (rank for i in range(parallel.tp) for rank in ranks.dense(i, stages))
            count, holders = 1, [tuple(sorted(everyone))]
        else:
            count = parallel.tp
            holders = [ranks.dense(index, stages) for index in range(count)]
        shapes = row_shapes(spec, row)
        for place, (name, shape) in enumerate(zip(hf_names(spec.family, key), shapes, strict=True)):
            if row.fusion != "none":
                yield from _fused(spec, row, name, shape, place, holders)
                continue
            dim = row.dim or 0
            size = spec.padded_vocab(count) if row.vocab else shape[dim]
            for index, members in enumerate(holders):
                yield from _part(name, shape, dim, index, size // count, members, _kind(row))


def _fused(
    spec: ModelSpec,
    row: Row,
    name: str,
    shape: Shape,
    place: int,
    holders: Sequence[tuple[int, ...]],
) -> Iterator[Held]:
    """Yield what each piece of fused rows holds of the tensor number `place`; some hold none."""
    for index, members in enumerate(holders):
        parts = fused_parts(spec, row, index, len(holders))
        ranges = sorted((start, start + length) for at, start, length in parts if at == place)
        whole: list[tuple[int, int]] = []
        for start, end in ranges:
            if whole and whole[-1][1] == start:
                start = whole.pop()[0]
            whole.append((start, end))
        for start, end in whole:
            yield Held(name, shape, 0, start, end - start, members, _kind(row))


def server_holdings(spec: ModelSpec, tp: int, ep: int) -> Iterator[Held]:
    """Yield what the ranks of one SGLang server hold. ep: of tp, how many ranks split the experts.

    With more ranks than KV heads each head is held by several ranks.
    """
    everyone = tuple(range(tp))
    for key in model_keys(spec):
        row = row_of(spec.family, key)
        names, shapes = hf_names(spec.family, key), row_shapes(spec, row)
        for place, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            dim = row.dim or 0
            split_norm = spec.family.split_norms and row in QK_NORM
            whole = row.dim is None and not row.expert and not split_norm
            if whole or (row.vocab and spec.family.scaled_embedding):
                yield Held(name, shape, 0, 0, shape[0], everyone, _kind(row))
                continue
            if row.expert:
                first, count = key.expert // (spec.num_experts // ep) * (tp // ep), tp // ep
                count = 1 if row.dim is None else count  # of a bias the others hold zeros
                holders = [(first + index,) for index in range(count)]
            elif (row.fusion == "qkv" and place > 0) or row.mcore[0] == KEY_NORM:
                count = min(tp, spec.num_kv_heads)
                copies = tp // count
                holders = [tuple(everyone[i * copies : (i + 1) * copies]) for i in range(count)]
            else:
                count, holders = tp, [(rank,) for rank in everyone]
            if row.fusion == "delta":
                yield from _fused(spec, row, name, shape, place, holders)
                continue
            size = _multiple(shape[0], SGLANG_VOCAB_MULTIPLE) if row.vocab else shape[dim]
            for index, members in enumerate(holders):
                yield from _part(name, shape, dim, index, size // count, members, _kind(row))


def as_held(held: Iterable[Held], format: Format | None) -> Iterator[Held]:
    """Yield the parts of tensors as servers of `format` hold them; None: just `held`.

    A matrix becomes numbers, of the same parts, and scales: of a rank's rows, or of all rows where
    ranks hold some columns of each. held: the parts of one tensor follow each other.
    """
    for name, found in groupby(held, key=lambda part: part.name):
        parts = list(found)
        if format is None or not is_quantised(name, len(parts[0].shape)):
            yield from parts
            continue
        rows = parts[0].shape[0]
        yield from (replace(part, kind=NUMBERS) for part in parts)
        scales = replace(parts[0], name=scales_of(name), shape=(rows, 1), dim=0, kind=SCALES)
        if parts[0].dim == 0:
            yield from (
                replace(scales, start=part.start, length=part.length, ranks=part.ranks)
                for part in parts
            )
        else:
            ranks = tuple(sorted({rank for part in parts for rank in part.ranks}))
            yield replace(scales, start=0, length=rows, ranks=ranks)


def _kind(row: Row) -> Kind:
    return EXACT if row.exact else PLAIN


def _part(
    name: str,
    shape: Shape,
    dim: int,
    index: int,
    length: int,
    ranks: tuple[int, ...],
    kind: Kind = PLAIN,
) -> Iterator[Held]:
    """Yield the part `index`, without padding; nothing where it is padding alone."""
    start = index * length
    length = min(length, shape[dim] - start)
    if length > 0:
        yield Held(name, shape, dim, start, length, ranks, kind)


def _stages(
    spec: ModelSpec, parallel: ParallelConfig, key: Key, row: Row, stage_of: Mapping[int, int]
) -> tuple[int, ...]:
    """Return the pipeline stages that hold a parameter: both ends a tied embedding."""
    last = parallel.pp - 1
    if key.layer >= 0:
        return (stage_of[key.layer],)
    if row.mcore[0].startswith("embedding."):
        return (0, last) if spec.tied and last > 0 else (0,)
    return (last,)


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


class _LearnerRanks:
    """Lists the ranks that hold the same weights, by the smallest of them."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._parallel = parallel
        self._stage = parallel.tp * parallel.cp * parallel.dp
        self._dense = _by_first(groups_along(dense_axes(parallel), ("cp", "dp")))
        self._experts = _by_first(groups_along(expert_axes(parallel), ("edp",)))

    def dense(self, tp_rank: int, stages: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks with a slice of the dense weights."""
        return tuple(r for stage in stages for r in self._dense[stage * self._stage + tp_rank])

    def of_experts(self, ep_rank: int, etp_rank: int, stages: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks with a slice of the experts of `ep_rank`."""
        first = ep_rank * self._parallel.expert_tp + etp_rank
        return tuple(r for stage in stages for r in self._experts[stage * self._stage + first])


def _by_first(groups: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, ...]]:
    return {group[0]: group for group in groups}
