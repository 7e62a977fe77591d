"""Reads a distributed checkpoint's `.metadata` without running anything that it names.

Torch writes it as a pickle and reads it with `pickle.load`, which calls whatever the file says.
Here a name outside a short list ends the reading before anything is called. What is on the list
builds records and nothing else.

Invariant: what is returned describes tensors that are covered by pieces in files beside it.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import sys
from collections.abc import Mapping, Sequence
from enum import EnumType
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from megatron_opd.config.wording import line

METADATA = ".metadata"
_TORCH = "torch.distributed.checkpoint"
ALLOWED: Mapping[str, frozenset[str]] = {
    f"{_TORCH}.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    f"{_TORCH}.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    # Megatron's own writer stores its plan too.
    f"{_TORCH}.planner": frozenset(
        {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}
    ),
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),  # looks a name up in a table
    "pathlib": frozenset({"PosixPath", "PurePosixPath"}),
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath"}),  # as Python 3.13 writes them
}
"""Module -> names that may be called, besides torch's dtypes."""
OLD_NAMES: Mapping[tuple[str, str], type] = {
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): SavePlan,
}
"""Names in checkpoints from before Megatron-Core 0.16, read as torch's records."""


_KEEPS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


class MetadataRefused(pickle.UnpicklingError):
    """Reports that the pickle names something that no checkpoint needs."""


class _Records(pickle.Unpickler):
    """Reads a pickle and notices changed classes: it can set attributes of whatever it names.

    unchanged: None, or what it changed; as it was then. Call it after `load`, however that ended.
    """

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self._named: dict[int, tuple[Any, dict[str, Any]]] = {}

    def unchanged(self) -> str | None:
        changed = None
        for thing, before in self._named.values():
            now = dict(vars(thing))
            for name in now.keys() | before.keys():
                if name in before and now.get(name) is before[name]:
                    continue
                changed = f"{name} of {getattr(thing, '__qualname__', thing)}"
                if not isinstance(thing, type):  # a member of an enumeration, or a function
                    vars(thing).clear()
                    vars(thing).update(before)
                elif name in before:
                    setattr(thing, name, before[name])
                else:
                    delattr(thing, name)
        return changed

    def find_class(self, module: str, name: str, /) -> Any:
        found = self._allowed(module, name)
        for thing in (found, *(found if isinstance(found, EnumType) else ())):
            if hasattr(thing, "__dict__"):
                self._named.setdefault(id(thing), (thing, dict(vars(thing))))
        return found

    def _allowed(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) in OLD_NAMES:
            return OLD_NAMES[module, name]
        if name not in ALLOWED.get(module, frozenset()):
            raise MetadataRefused(
                f"it names {module}.{name}, which no checkpoint needs; nothing was run"
            )
        return super().find_class(module, name)


def unpickle(stream: BinaryIO) -> Any:
    """Read a pickle of allowed records. Refused: it names anything else, or changes a class.

    A damaged pickle raises anything.
    """
    data = stream.read()
    _check_memo(data)
    records = _Records(io.BytesIO(data))
    try:
        found = records.load()
    finally:
        changed = records.unchanged()
        if changed is not None:
            raise MetadataRefused(f"it sets {changed}, which no checkpoint does; it was set back")
    return found


def _check_memo(data: bytes) -> None:
    """Refuse a pickle that keeps a value under a larger number than it has bytes.

    Python's reader makes an array of that many entries: four bytes ask for 64 GB.
    """
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in _KEEPS and isinstance(argument, int) and argument > len(data):
            raise MetadataRefused(
                f"it keeps a value as number {argument}, and is of {len(data)} bytes"
            )


def read_metadata(directory: Path) -> Metadata:
    """Return what `directory`/.metadata says.

    ValueError, in one line that names the file: it cannot be read, names what is not allowed (the
    line says what), or is not what the module's invariant says.
    """
    path = directory / METADATA
    try:
        with path.open("rb") as stream:
            found = unpickle(stream)
    except MetadataRefused as error:
        raise ValueError(f"{path} is refused: {line(error)}") from None
    except Exception as error:  # noqa: BLE001  a damaged pickle raises anything
        reason = line(f"{type(error).__name__}: {error}")
        raise ValueError(f"cannot read {path}: {reason}") from None
    try:
        fault = _fault(found)
    except Exception as error:  # noqa: BLE001  records may hold anything where numbers belong
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise ValueError(f"{path} does not describe a checkpoint: {line(fault)}")
    return found


def tensors_only(metadata: Metadata) -> Metadata:
    """Return the metadata without pickled objects, which torch reads without restriction."""
    kept: dict[str, Any] = {
        key: stored
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    places = {index: place for index, place in metadata.storage_data.items() if index.fqn in kept}
    return Metadata(kept, storage_data=places, storage_meta=metadata.storage_meta)


def _fault(found: Any) -> str | None:
    """Return what is wrong with it, or None."""
    if not isinstance(found, Metadata):
        return f"it holds a {type(found).__name__}"
    pieces: set[tuple[str, torch.Size]] = set()
    for key, stored in found.state_dict_metadata.items():
        if not isinstance(key, str):
            return f"the name {key!r} is a {type(key).__name__}"
        if isinstance(stored, BytesStorageMetadata):
            continue
        if not isinstance(stored, TensorStorageMetadata):
            return f"{key!r} is a {type(stored).__name__}"
        fault = _fault_in_pieces(key, stored)
        if fault is not None:
            return fault
        pieces |= {(key, chunk.offsets) for chunk in stored.chunks}
    placed: set[tuple[str, torch.Size]] = set()
    for index, place in found.storage_data.items():
        file, span = place.relative_path, (place.offset, place.length)
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            return f"{index.fqn} lies in {file!r}, not in a file of its directory"
        if not all(isinstance(number, int) and 0 <= number <= sys.maxsize for number in span):
            return f"{index.fqn} lies at {span} in its file"
        if index.offset is not None:
            placed.add((index.fqn, index.offset))
    if pieces != placed:
        return f"a piece of {min(pieces ^ placed)[0]} is described, or placed in a file, alone"
    return None


def _fault_in_pieces(key: str, stored: TensorStorageMetadata) -> str | None:
    if not isinstance(stored.properties.dtype, torch.dtype):
        return f"{key} has no dtype"
    held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    if held != math.prod(stored.size):
        return f"pieces of {key} hold {held} of {math.prod(stored.size)} elements"
    for chunk in stored.chunks:
        ends = zip(chunk.offsets, chunk.sizes, stored.size, strict=True)
        if any(at < 0 or n < 0 or at + n > size for at, n, size in ends):
            return f"a piece of {key} lies outside of it"
    if len(stored.chunks) > 1 and _overlap(stored.chunks):
        return f"two pieces of {key} overlap"
    return None


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether two of them share an element; n cost n squared small comparisons."""
    held = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    starts = np.array([list(chunk.offsets) for chunk in held])
    ends = starts + np.array([list(chunk.sizes) for chunk in held])
    before = np.all(starts[:, None] < ends[None], axis=-1)
    return int((before & before.T).sum()) > len(held)
