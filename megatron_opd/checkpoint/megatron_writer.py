"""Writes a Megatron distributed checkpoint piece by piece, through torch's own writer.

`megatron.core.dist_checkpointing.save` takes a state dict that is whole in memory. The directory it
makes is torch.distributed.checkpoint's (`__0_0.distcp`, ..., and `.metadata`, which lists every
piece) with `metadata.json` and `common.pt` beside it; so units of a few hundred megabytes go
through FileSystemWriter one after another, and the list is made at the end.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_opd.checkpoint.conversion import cast_to
from megatron_opd.checkpoint.digest import entry_of
from megatron_opd.checkpoint.hf_reader import SafetensorsSource
from megatron_opd.checkpoint.megatron_names import CONTENT, state_keys, written_keys
from megatron_opd.checkpoint.megatron_reader import DESCRIPTION
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.families.keys import Key, row_of
from megatron_opd.models.shards import to_stored
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import hf_shapes, row_shapes, stored_rows

# The versions of the formats that Megatron-Core 0.16 writes; 0.19 reads them too.
_DESCRIPTION = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Target:
    """Says how a model is stored. parallel: its tensors are cut into the pieces of these ranks.

    dtype: cast every tensor to it; None: keep each tensor's own.
    """

    spec: ModelSpec
    parallel: ParallelConfig
    dtype: torch.dtype | None

    def sizes_of(self, key: Key) -> list[tuple[int, ...]]:
        """Tell the shape of each stored tensor of a parameter."""
        row = row_of(self.spec.family, key)
        if row.vocab:
            rows = [self.spec.padded_vocab(self.parallel.tp)]
        else:
            rows = stored_rows(self.spec, row)
        tail = row_shapes(self.spec, row)[0][1:]
        return [(count, *tail) for count in rows]

    def chunks_of(self, key: Key, size: tuple[int, ...]) -> list[ChunkStorageMetadata]:
        """Return the pieces of a stored tensor: one per tensor-parallel rank."""
        row = row_of(self.spec.family, key)
        count = self.parallel.expert_tp if row.expert else self.parallel.tp
        if row.dim is None or count == 1:
            return [ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))]
        sizes, step = list(size), size[row.dim] // count
        sizes[row.dim] = step
        offsets = [
            [step * i if d == row.dim else 0 for d in range(len(size))] for i in range(count)
        ]
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(sizes)) for o in offsets]


class _Streamed(DefaultSavePlanner):
    """Makes the pieces one parameter at a time, when the writer asks for them, in its order."""

    def __init__(self, source: SafetensorsSource, target: Target, keys: Iterable[Key]) -> None:
        super().__init__()
        self._source, self._target = source, target
        self._key_of = {name: key for key in keys for name in written_keys(target.spec, key)}
        self._current: tuple[Key, dict[str, torch.Tensor]] | None = None
        self.tensors: dict[str, dict[str, Any]] = {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return a piece in memory of its own: the writer stores all that lies behind a view."""
        name, data = write_item.index.fqn, write_item.tensor_data
        if data is None:
            return _empty_state()
        key = self._key_of[name]
        if self._current is None or self._current[0] != key:
            self._current = None  # freed before the next is read
            self._current = key, self._stored(key)
        piece = self._current[1][name]
        for dim, (start, length) in enumerate(
            zip(data.chunk.offsets, data.chunk.sizes, strict=True)
        ):
            piece = piece.narrow(dim, start, length)
        whole = piece.untyped_storage().nbytes() == piece.numel() * piece.itemsize
        return piece if whole and piece.is_contiguous() else piece.clone()

    def _stored(self, key: Key) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a parameter, by name."""
        spec, row = self._target.spec, row_of(self._target.spec.family, key)
        parts: list[torch.Tensor] = []
        for name, shape in hf_shapes(spec, key).items():
            tensor = self._source.read(name, shape, 0, 0, shape[0])
            if (dtype := cast_to(spec, key, self._target.dtype)) is not None:
                tensor = tensor.to(dtype)
            self.tensors[name] = entry_of(tensor)
            parts.append(tensor)
        if row.vocab:
            missing = spec.padded_vocab(self._target.parallel.tp) - spec.vocab_size
            stored = [F.pad(parts[0], (0, 0, 0, missing)) if missing else parts[0]]
        else:
            stored = to_stored(row, spec, parts)
        return dict(zip(written_keys(spec, key), stored, strict=True))


def write_unit(
    path: Path, unit: int, keys: Sequence[Key], source: SafetensorsSource, target: Target
) -> dict[str, Any]:
    """Write the parameters `keys` to one file; on return it is on the disk.

    The record says what the file holds: {tensors: {Hugging Face name: {dtype, digest}}, pieces:
    [[stored name, offsets, sizes, size, dtype, file, byte offset, bytes]], states: [[name, file,
    byte offset, bytes]]}. OSError: see Crew.step.
    """
    planner = _Streamed(source, target, keys)
    items = [item for key in keys for item in _items(source, target, key)]
    states = [name for key in keys for name in state_keys(target.spec, key)]
    items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in states]
    writer = FileSystemWriter(path, single_file_per_rank=True, thread_count=1)
    # A unit is to the writer what a rank is: it names the file.
    writer.set_up_storage_writer(False, rank=unit, use_collectives=False)
    plan = writer.prepare_local_plan(SavePlan(items))
    try:
        results: list[WriteResult] = writer.write_data(plan, planner).wait()
    except RuntimeError as error:
        # torch's archive writer reports a full disk this way
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    by_index = {item.index: item.tensor_data for item in items}
    pieces: list[list[Any]] = []
    written: list[list[Any]] = []
    for result in results:
        data, info = by_index[result.index], result.storage_data
        if data is None:
            written.append([result.index.fqn, info.relative_path, info.offset, info.length])
            continue
        pieces.append(
            [
                result.index.fqn,
                list(data.chunk.offsets),
                list(data.chunk.sizes),
                list(data.size),
                str(data.properties.dtype).removeprefix("torch."),
                info.relative_path,
                info.offset,
                info.length,
            ]
        )
    return {"tensors": planner.tensors, "pieces": pieces, "states": written}


def _empty_state() -> io.BytesIO:
    """Return an empty module state, in Megatron's form of a sharded object."""
    data = io.BytesIO()
    torch.save([None], data)
    return data


def _items(source: SafetensorsSource, target: Target, key: Key) -> list[WriteItem]:
    shapes = hf_shapes(target.spec, key)
    dtypes = {
        name: cast_to(target.spec, key, target.dtype) or source.dtype_of(name) for name in shapes
    }
    if len(set(dtypes.values())) > 1:
        kinds = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"{source.path}: tensors of one parameter must share a dtype, got {kinds}")
    properties = TensorProperties(dtype=next(iter(dtypes.values())))
    named = zip(written_keys(target.spec, key), target.sizes_of(key), strict=True)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, torch.Size(size)),
        )
        for name, size in named
        for chunk in target.chunks_of(key, size)
    ]


def finish(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write what makes the units a checkpoint: .metadata, metadata.json, common.pt."""
    tensors: dict[str, TensorStorageMetadata] = {}
    states: dict[str, BytesStorageMetadata] = {}
    results: list[WriteResult] = []
    for record in records:
        for name, offsets, sizes, size, dtype, file, start, length in record["pieces"]:
            properties = TensorProperties(dtype=getattr(torch, dtype))
            stored = tensors.setdefault(
                name, TensorStorageMetadata(properties, torch.Size(size), [])
            )
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            stored.chunks.append(chunk)
            place = _StorageInfo(file, start, length)
            results.append(WriteResult(MetadataIndex(name, chunk.offsets), length, place))
        for name, file, start, length in record["states"]:
            states[name] = BytesStorageMetadata()
            place = _StorageInfo(file, start, length)
            results.append(WriteResult(MetadataIndex(name), length, place))
    # A pickle of plain dictionaries: the format has no other place for its content's description.
    torch.save({"content_metadata": CONTENT}, path / "common.pt")
    (path / DESCRIPTION).write_text(json.dumps(_DESCRIPTION) + "\n", encoding="utf-8")
    FileSystemWriter(path).finish(Metadata({**tensors, **states}), [results])
