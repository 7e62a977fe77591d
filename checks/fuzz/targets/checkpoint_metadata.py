"""A distributed checkpoint's `.metadata`: a pickle that may name anything and must run nothing."""

from __future__ import annotations

import math
import pickle
import struct
import sys
from enum import EnumType
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, planner
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes
from checks.fuzz.places import scratch
from megatron_opd.checkpoint.restricted_metadata import (
    ALLOWED,
    METADATA,
    OLD_NAMES,
    read_metadata,
    tensors_only,
)

MARKER = scratch() / "ran"
# A module of the standard library that nothing imports: named by a pickle, it would be.
UNUSED = "this"
assert UNUSED not in sys.modules
SHELL = f"touch {MARKER}"
CODE = f"open({str(MARKER)!r}, 'w')"


def named() -> list[Any]:
    """Everything that the reader hands to a pickle, as far as it has attributes."""
    modules = (records, planner, filesystem, torch.serialization)
    found: list[Any] = [
        getattr(module, name)
        for module in modules
        for name in ALLOWED.get(module.__name__, ())
        if hasattr(module, name)
    ]
    members = [member for each in found if isinstance(each, EnumType) for member in each]
    return [*found, *members, *OLD_NAMES.values(), Path, type(Path())]


@cache
def originals() -> list[tuple[Any, dict[str, Any]]]:
    """What each of them is made of."""
    return [(thing, dict(vars(thing))) for thing in named() if hasattr(thing, "__dict__")]


def call(data: bytes) -> Metadata:
    """Read it; whatever comes of that, nothing has run and nothing has changed."""
    originals()
    (scratch() / METADATA).write_bytes(data)
    modules = set(sys.modules)
    try:
        found = read_metadata(scratch())
        tensors_only(found)
        return found
    finally:
        # the text codecs that a damaged string names are Python's own
        new = {name for name in set(sys.modules) - modules if not name.startswith("encodings")}
        if MARKER.exists():
            MARKER.unlink()
            raise AssertionError("the pickle ran a command")
        if new:
            raise AssertionError(f"the pickle imported {min(new)}")
        for thing, before in originals():
            now = dict(vars(thing))
            if now.keys() != before.keys() or any(now[n] is not before[n] for n in before):
                raise AssertionError(f"the pickle changed {thing!r}")


def oracle(data: bytes, found: Metadata) -> str | None:
    """Tensors are covered by pieces in files beside it."""
    placed = {(index.fqn, tuple(index.offset)) for index in found.storage_data if index.offset}
    for index, place in found.storage_data.items():
        file = place.relative_path
        if not file or "/" in file or file in (".", ".."):
            return "a file elsewhere"
        if place.offset < 0 or place.length < 0:
            return f"{index.fqn} lies before its file"
    for key, stored in found.state_dict_metadata.items():
        if not isinstance(stored, records.TensorStorageMetadata):
            continue
        size, cells = list(stored.size), 0
        boxes: list[tuple[list[int], list[int]]] = []
        for chunk in stored.chunks:
            at, shape = list(chunk.offsets), list(chunk.sizes)
            if not len(at) == len(shape) == len(size):
                return "a piece of another rank"
            if any(a < 0 or n < 0 or a + n > s for a, n, s in zip(at, shape, size, strict=True)):
                return "a piece outside of its tensor"
            if size and (key, tuple(at)) not in placed and at:
                return "a piece that lies nowhere"
            for other, extent in boxes:
                if all(
                    a < b + m and b < a + n
                    for a, n, b, m in zip(at, shape, other, extent, strict=True)
                ):
                    return "pieces that overlap"
            boxes.append((at, shape))
            cells += math.prod(shape)
        if cells != math.prod(size):
            return "elements that no piece holds"
    return None


def whole() -> Metadata:
    """One tensor in two pieces, one pickled object."""
    size, half = torch.Size([4, 2]), torch.Size([2, 2])
    chunks = [records.ChunkStorageMetadata(torch.Size([row, 0]), half) for row in (0, 2)]
    properties = records.TensorProperties(torch.bfloat16)
    tensors: dict[str, Any] = {
        "weight": records.TensorStorageMetadata(properties, size, chunks),
        "extra/shard_0_1": records.BytesStorageMetadata(),
    }
    info = filesystem._StorageInfo  # pyright: ignore[reportPrivateUsage]
    places: dict[MetadataIndex, Any] = {
        MetadataIndex("weight", torch.Size([row, 0]), row // 2): info("__0_0.distcp", 16 * row, 32)
        for row in (0, 2)
    }
    places[MetadataIndex("extra/shard_0_1")] = info("__0_0.distcp", 64, 9)
    meta = records.StorageMeta(checkpoint_id=Path("/somewhere"), save_id="1", load_id="2")
    return Metadata(tensors, None, places, meta)


class Calls:
    """A pickle of it calls a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


CORPUS = [pickle.dumps(whole(), protocol) for protocol in range(2, 6)]
NAMES = (
    *(("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec")),
    *(("builtins", "getattr"), ("builtins", "__import__"), ("subprocess", "call"), (UNUSED, "s")),
    *(("torch", "load"), ("torch", "hub"), ("torch.serialization", "os.system"), ("torch", "os")),
    *(("torch.serialization", "load"), ("torch", "Size.__new__"), ("pathlib", "os.system")),
    *(("torch.distributed.checkpoint.metadata", "os.system"), ("pathlib", "Path"), ("torch", "")),
    *((module, name) for module, names in ALLOWED.items() for name in sorted(names)),
    *(("torch", "float32"), *OLD_NAMES),
)
TEXTS = (SHELL, CODE, "weight", "__class__", "__hash__", "__setstate__", "fqn", "__reduce__", "..")


def text(value: str) -> bytes:
    """A string on the pickle's stack."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(rng: Random) -> bytes:
    """Something named, by either opcode."""
    module, attribute = rng.choice(NAMES)
    if rng.random() < 0.5:
        return f"c{module}\n{attribute}\n".encode()
    return text(module) + text(attribute) + b"\x93"


def program(rng: Random) -> bytes:
    """Opcodes in an order that mostly makes sense: values, calls, states, containers."""
    out = bytearray(b"\x80\x04")
    for _ in range(rng.randint(1, 12)):
        out += rng.choice(
            (
                name(rng),
                name(rng) + b"(" + text(rng.choice(TEXTS)) + b"tR",
                name(rng) + b")\x81",
                name(rng) + b")R",
                name(rng) + b")}\x92",
                b"}" + text(rng.choice(TEXTS)) + text(rng.choice(TEXTS)) + b"s",
                b"N" + b"}" + text(rng.choice(TEXTS)) + b"K\x01s\x86b",
                text(rng.choice(TEXTS)),
                struct.pack("<BB", 0x4B, rng.randrange(256)),
                rng.choice((b"b", b"R", b"\x81", b"t", b"(", b"]", b"}", b")", b"0", b"2", b"s")),
                rng.choice((b"a", b"e", b"u", b"\x85", b"\x86", b"\x94", b"h\x00", b"Q", b"Pi\n")),
                b"(" + text(SHELL) + b"ios\nsystem\n",
            )
        )
    return bytes(out + b".")


def embedded(rng: Random) -> bytes:
    """A whole checkpoint's record, and within it a call."""
    import os

    function, argument = rng.choice(((os.system, SHELL), (eval, CODE), (exec, CODE)))
    payload: Any = Calls(function, argument)
    value = whole()
    where = rng.randrange(4)
    if where == 0:
        value.state_dict_metadata["x"] = payload
    elif where == 1:
        value.storage_data[MetadataIndex("x")] = payload
    elif where == 2:
        value.planner_data = payload
    else:
        value = payload
    return pickle.dumps(value, rng.randint(2, 5))


def spliced(rng: Random) -> bytes:
    """A whole record with opcodes in its middle."""
    data = rng.choice(CORPUS)
    at = rng.randrange(2, len(data))
    return data[:at] + program(rng)[2:-1] + data[at:]


BYTES = damaged_bytes(CORPUS, most=3)


def records_changed(rng: Random) -> bytes:
    """A record of other numbers: sizes, places and pieces that need not fit."""
    value: Any = whole()
    stored = value.state_dict_metadata["weight"]
    numbers = [rng.choice((-1, 0, 1, 2, 3, 4, 2**31)) for _ in range(rng.choice((1, 2, 2, 2, 3)))]
    shape = torch.Size(abs(number) if rng.random() < 0.9 else number for number in numbers)
    edit = rng.randrange(6)
    if edit == 0:
        stored.size = shape
    elif edit == 1:
        stored.chunks[rng.randrange(2)].sizes = shape
    elif edit == 2:
        stored.chunks[rng.randrange(2)].offsets = shape
    elif edit == 3:
        stored.chunks.append(stored.chunks[0])
    elif edit == 4:
        place = rng.choice(list(value.storage_data.values()))
        place.relative_path = rng.choice(("../x", "/etc/passwd", "", ".", "a/b", "x", 3, None))
    else:
        place = rng.choice(list(value.storage_data.values()))
        place.offset = rng.choice((-1, 2**63, 1.5, "1", None, True, 7))
    return pickle.dumps(value, rng.randint(2, 5))


def make(rng: Random) -> bytes:
    """A pickle."""
    return rng.choice((BYTES, BYTES, program, embedded, spliced, records_changed))(rng)


TARGET = Target("checkpoint_metadata", make, call, (ValueError,), oracle, share=2)
