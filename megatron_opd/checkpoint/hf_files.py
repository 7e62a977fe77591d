"""Reads what a Hugging Face checkpoint's safetensors files hold, from their headers alone.

Format (huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON header
{tensor: {dtype, shape, data_offsets}}, then the data those offsets end in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megatron_opd.config.unique_keys import unique_keys
from megatron_opd.config.wording import line, shown
from megatron_opd.models.file_kinds import is_pointer, other_kind, pointer_line
from megatron_opd.models.places import Place, places
from megatron_opd.models.spec import ModelSpec
from sglang_bridge.errors import some
from sglang_bridge.language_models import PREFIX, PUBLISHED_PREFIX
from sglang_bridge.weights.checkpoint_formats import CheckpointFormat

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Bytes an element, of the types that a learner can take.
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
# Bits an element, of every type that the format knows.
DTYPE_BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32},
    **{"BF16": 16, "F16": 16, "I16": 16, "U16": 16, "BOOL": 8, "I8": 8, "U8": 8},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
# The format's own limit.
MAX_HEADER_BYTES = 100_000_000
CHUNK_BYTES = 2**24
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHOWN = 3
MODEL_PREFIXES = ("model.", "lm_head.")
"""Starts of the names of a language model's own tensors."""
# Buffers that checkpoints of older transformers carry; they follow from config.json.
IGNORED = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Locates a tensor in a file. offset: of its first byte; dtype: safetensors' name."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Count the bytes of its data."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class CodedTensor(StoredTensor):
    """Locates a quantised tensor: its numbers and scales; dtype and shape are the plain tensor's.

    file and offset are those of its numbers.
    """

    format: CheckpointFormat
    numbers: StoredTensor
    scales: StoredTensor


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint directory `path`.

    ValueError, naming the file: none, cut short, unreadable, or not what the index says.
    """
    index = path / INDEX
    if not index.exists():
        if not (path / SINGLE).is_file():
            raise ValueError(other_kind(path) or f"{path} holds neither {SINGLE} nor {INDEX}")
        tensors = file_tensors(path / SINGLE)
        others = sorted(each.name for each in path.glob("*.safetensors") if each.name != SINGLE)
        # of these two SGLang knows that they are one model in two formats
        for name in others if others != ["consolidated.safetensors"] else ():
            _check_same(path, tensors, name, f"SGLang reads {name} too, for there is no {INDEX}")
        return tensors
    try:
        weight_map: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not all(map(_is_name, weight_map.values())):
            raise ValueError("weight_map must map tensors to file names without a directory")
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot read {index}: {type(error).__name__}: {line(error)}") from None
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        if not (path / name).is_file():
            raise ValueError(f"{path} lacks {name}, which {INDEX} names")
        for tensor, stored in file_tensors(path / name).items():
            if tensor in tensors:
                raise ValueError(
                    f"{path}: {line(tensor)} is in {tensors[tensor].file.name} and {name}"
                )
            tensors[tensor] = stored
    for tensor, name in weight_map.items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise ValueError(f"{path}: {name} lacks {line(tensor)}, which {INDEX} places there")
    unlisted = [tensor for tensor in tensors if tensor not in weight_map]
    if unlisted:
        raise ValueError(f"{index} lacks an entry for {some(unlisted)}")
    if SINGLE not in files and (path / SINGLE).is_file():
        why = f"transformers reads {SINGLE} and SGLang the files of {INDEX}"
        _check_same(path, tensors, SINGLE, why)
    return tensors


def _check_same(path: Path, tensors: Mapping[str, StoredTensor], name: str, why: str) -> None:
    """Raise ValueError unless the file `name` beside `tensors` holds exactly them."""
    other = file_tensors(path / name)
    if other.keys() != tensors.keys() or not all(
        same_data(stored, other[tensor]) for tensor, stored in tensors.items()
    ):
        mine = ", ".join(sorted({stored.file.name for stored in tensors.values()})[:SHOWN])
        raise ValueError(
            f"{path} holds two models, {name} and {mine}: {why}. Remove the one that is not meant"
        )


def same_data(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors are equal in type, shape and every byte. May raise OSError."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if isinstance(one, CodedTensor) or isinstance(other, CodedTensor):
        return (
            isinstance(one, CodedTensor)
            and isinstance(other, CodedTensor)
            and one.format == other.format
            and same_data(one.numbers, other.numbers)
            and same_data(one.scales, other.scales)
        )
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        left = one.num_bytes
        while left:
            size = min(left, CHUNK_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def file_tensors(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file. ValueError: it is cut short or no safetensors file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if is_pointer(file):
                raise ValueError(pointer_line(file))
            if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
                raise ValueError("its header is incomplete")
            header = _header(stream.read(length))
        entries = {name: _entry(name, entry) for name, entry in header.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a readable safetensors file: {line(error)}") from None
    end = 0
    for name, (_, _, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start != end or stop < start:
            raise ValueError(
                f"{file} is not a readable safetensors file: tensor {shown(name)} must start at "
                f"byte {end} of the data, where the one before it ends, got {start}..{stop}"
            )
        end = stop
    if size != 8 + length + end:
        raise ValueError(
            f"{file} is incomplete: its header describes {8 + length + end} bytes, got {size}"
        )
    tensors: dict[str, StoredTensor] = {}
    for name, (dtype, shape, start, stop) in entries.items():
        tensors[name] = stored = StoredTensor(file, dtype, shape, 8 + length + start)
        if prod(shape) * DTYPE_BITS[dtype] != (stop - start) * 8:
            raise ValueError(
                f"{file}: {shown(name)} must span {stored.num_bytes} bytes ({dtype} "
                f"{shown(list(shape))}), got {stop - start}"
            )
    return tensors


def _header(data: bytes) -> dict[str, Any]:
    """Return the header's entries by tensor. ValueError: not such JSON, or a tensor given twice."""
    if data[:1] != b"{":
        raise ValueError("its header is not a JSON object")
    header = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys)
    json.dumps(header, ensure_ascii=False).encode(
        "utf-8"
    )  # half of an escaped surrogate pair is not text
    metadata: Any = header.pop("__metadata__", None)
    if metadata is None:
        return header
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ must be a mapping of text to text")
    return header


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return (dtype, shape, first byte, end) of a tensor.

    ValueError names what is wrong with it.
    """
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"tensor {shown(name)} must have dtype, shape and data_offsets and nothing else"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"tensor {shown(name)} has the dtype {shown(dtype)}")
    for what, counts in (("shape", shape), ("data_offsets", offsets)):
        whole = isinstance(counts, list) and all(
            type(count) is int and 0 <= count < 2**63
            for count in counts  # pyright: ignore[reportUnknownVariableType]
        )
        if not whole or (what == "data_offsets" and len(counts) != 2):
            raise ValueError(f"tensor {shown(name)} has the {what} {shown(counts)}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def check_shape(stored: StoredTensor, shape: tuple[int, ...], path: Path, name: str) -> None:
    """Raise ValueError for a tensor of `path` whose shape differs from config.json's."""
    if stored.shape != shape:
        raise ValueError(
            f"{path}: tensor {name} must have shape {list(shape)} by config.json, "
            f"got {list(stored.shape)}"
        )


def check_dtype(stored: StoredTensor, path: Path, name: str) -> None:
    """Raise ValueError for a type that no learner can take."""
    if stored.dtype not in ITEM_BYTES:
        raise ValueError(
            f"{path}: tensor {name} must be of dtype {', '.join(ITEM_BYTES)}, got {stored.dtype}"
        )


def check_tensors(tensors: Mapping[str, StoredTensor], spec: ModelSpec, path: Path) -> None:
    """Check that the tensors are `spec`'s, no more and no less, of types that a learner can take.

    ValueError names the others.
    """
    check_complete(tensors, spec, path)
    for name in files_tensors(tensors, spec):
        check_dtype(tensors[name], path, name)
    _refuse_extra(unread_tensors(tensors, spec), spec, path)


def check_complete(tensors: Mapping[str, StoredTensor], spec: ModelSpec, path: Path) -> None:
    """Check that every tensor of the model is there with its shape, and none that would be unread.

    Heads of other tasks, which no language model has, may lie beside them, and what no text goes
    through (checkpoint/carried.py). ValueError names those that are missing, misshapen or of no
    use, as files name them.
    """
    wanted = files_tensors(tensors, spec)
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise ValueError(f"{path} lacks {some(missing)}")
    for name, place in wanted.items():
        check_shape(tensors[name], place.shape, path, name)
    check_tied(tensors, path, tied=spec.tied)
    extra = unread_tensors(tensors, spec)
    _refuse_extra([name for name in extra if name.startswith(MODEL_PREFIXES)], spec, path)


def files_tensors(tensors: Mapping[str, StoredTensor], spec: ModelSpec) -> dict[str, Place]:
    """Return the tensors of files that the model is read from, with a place in each."""
    return {place.name: place for place in places(spec, tensors).values()}


def check_tied(tensors: Mapping[str, StoredTensor], path: Path, *, tied: bool) -> None:
    """Raise ValueError when a tied model's own head, if one is stored, is not its embedding."""
    embedding = EMBEDDING.replace(PREFIX, PUBLISHED_PREFIX)
    embedding = embedding if embedding in tensors else EMBEDDING
    if not tied or HEAD not in tensors or embedding not in tensors:
        return
    if not same_data(tensors[HEAD], tensors[embedding]):
        raise ValueError(
            f"{path}: {HEAD} must equal {embedding} when tie_word_embeddings is true, as "
            "transformers would use the one and SGLang and the learner the other: set "
            f"tie_word_embeddings to false to use {HEAD}, or leave it out of the checkpoint"
        )


def unread_tensors(tensors: Mapping[str, StoredTensor], spec: ModelSpec) -> list[str]:
    """List the tensors that nothing reads or keeps, but for those that follow from config.json."""
    used = {*files_tensors(tensors, spec), *((HEAD,) if spec.tied else ())}
    used |= {name for name in tensors if name.startswith(spec.carried)}
    return [name for name in tensors if name not in used and not name.endswith(IGNORED)]


def _refuse_extra(extra: list[str], spec: ModelSpec, path: Path) -> None:
    if extra:
        raise ValueError(
            f"{path} holds {some(extra)}, which a {spec.family.name} model of its config.json "
            "does not have: correct config.json, or leave them out of the checkpoint"
        )


def _is_name(value: object) -> bool:
    """Return whether it names a file of the checkpoint itself, on one line."""
    if not isinstance(value, str) or len(value.encode("utf-8", "replace")) > 255:
        return False
    return value != "" and value == Path(value).name and value.isprintable()
