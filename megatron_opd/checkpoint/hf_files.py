"""What a Hugging Face checkpoint's safetensors files hold, from their headers alone. Torch-free.

Format (huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON header
{tensor: {dtype, shape, data_offsets}}, then the data those offsets end in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from megatron_opd.checkpoint.model_spec import ModelSpec
from megatron_opd.checkpoint.tensors import expected_tensors
from megatron_opd.weight_sync.names import in_memory

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Bytes an element, of the types that a learner can take.
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
SHOWN = 3
# Buffers that checkpoints of older transformers carry; they follow from config.json.
IGNORED = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file. offset: of its first byte in the file; dtype: safetensors' name."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Of its data; 0 for a dtype that nothing here reads."""
        return prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint directory `path`.

    ValueError, naming the file: none, cut short, unreadable, or not what the index says.
    """
    index = path / INDEX
    if not index.exists():
        if not (path / SINGLE).is_file():
            raise ValueError(f"{path} holds neither {SINGLE} nor {INDEX}")
        return file_tensors(path / SINGLE)
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        files = sorted(set(map(str, weight_map.values())))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read {index}: {error!r}") from None
    tensors: dict[str, Stored] = {}
    for name in files:
        if not (path / name).is_file():
            raise ValueError(f"{path} lacks {name}, which {INDEX} names")
        for tensor, stored in file_tensors(path / name).items():
            if tensor in tensors:
                raise ValueError(f"{path}: {tensor} is in {tensors[tensor].file.name} and {name}")
            tensors[tensor] = stored
    for tensor, name in weight_map.items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise ValueError(f"{path}: {name} lacks {tensor}, which {INDEX} places there")
    unlisted = [tensor for tensor in tensors if tensor not in weight_map]
    if unlisted:
        raise ValueError(f"{index} lacks an entry for {_some(unlisted)}")
    return tensors


def file_tensors(file: Path) -> dict[str, Stored]:
    """The tensors of one file. ValueError: it is cut short or no safetensors file."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("its header is not whole")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        tensors = {
            name: Stored(
                file,
                str(entry["dtype"]),
                tuple(int(count) for count in entry["shape"]),
                8 + length + int(entry["data_offsets"][0]),
            )
            for name, entry in header.items()
        }
        spans = {
            n: int(e["data_offsets"][1]) - int(e["data_offsets"][0]) for n, e in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from None
    if size != 8 + length + end:
        raise ValueError(
            f"{file} is not whole: its header describes {8 + length + end} bytes, got {size}"
        )
    for name, stored in tensors.items():
        if stored.dtype in ITEM_BYTES and stored.num_bytes != spans[name]:
            raise ValueError(
                f"{file}: {name} must span {stored.num_bytes} bytes ({stored.dtype} "
                f"{list(stored.shape)}), got {spans[name]}"
            )
    return tensors


def find(tensors: Mapping[str, Stored], name: str) -> Stored | None:
    """The tensor published as `name`, in either spelling: a part of a larger one in the second."""
    if name in tensors:
        return tensors[name]
    other = in_memory(name)
    if other is None or other.name not in tensors:
        return None
    whole = tensors[other.name]
    if other.index is None:
        return whole
    if len(whole.shape) != 3 or other.index >= whole.shape[0] or whole.shape[1] % other.parts:
        return None
    one = replace(whole, shape=whole.shape[1:])
    rows = one.shape[0] // other.parts
    part = replace(whole, shape=(rows, *one.shape[1:]))
    offset = whole.offset + other.index * one.num_bytes + other.part * part.num_bytes
    return replace(part, offset=offset)


def check_shape(stored: Stored, shape: tuple[int, ...], path: Path, name: str) -> None:
    """Raise ValueError for a tensor of the checkpoint `path` that config.json makes another."""
    if stored.shape != shape:
        raise ValueError(
            f"{path}: tensor {name} must have shape {list(shape)} by config.json, "
            f"got {list(stored.shape)}"
        )


def check_dtype(stored: Stored, path: Path, name: str) -> None:
    """Raise ValueError for a type that no learner can take."""
    if stored.dtype not in ITEM_BYTES:
        raise ValueError(
            f"{path}: tensor {name} must be of dtype {', '.join(ITEM_BYTES)}, got {stored.dtype}"
        )


def check_tensors(tensors: Mapping[str, Stored], spec: ModelSpec, path: Path) -> None:
    """The tensors are `spec`'s, no more and no less. ValueError names those that are not."""
    expected = expected_tensors(spec)
    missing: list[str] = []
    used: set[str] = set()
    for name, shape in expected.items():
        stored = find(tensors, name)
        if stored is None:
            missing.append(name)
            continue
        other = in_memory(name)
        used.add(name if name in tensors or other is None else other.name)
        check_shape(stored, shape, path, name)
        check_dtype(stored, path, name)
    if missing:
        raise ValueError(f"{path} lacks {_some(missing)}")
    tied = {"lm_head.weight"} if spec.tied else set[str]()
    extra = [n for n in tensors if n not in used | tied and not n.endswith(IGNORED)]
    if extra:
        raise ValueError(
            f"{path} holds {_some(extra)}, which a {spec.family.name} model of its config.json "
            "does not have"
        )


def _some(names: Iterable[str]) -> str:
    """`2 tensors: a, b`; the first few of many."""
    listed = sorted(names)
    shown = ", ".join(listed[:SHOWN]) + (", ..." if len(listed) > SHOWN else "")
    return f"{len(listed)} tensor{'s' * (len(listed) > 1)}: {shown}"
