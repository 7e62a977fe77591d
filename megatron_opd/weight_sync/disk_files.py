"""Writes one rank's file of a version: safetensors, with a checksum of every chunk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_opd.checkpoint.part_dir import sync_directory
from sglang_bridge.weights.manifest import Array, File, Form, Slice, checksum, rows_of_chunk

ALIGNMENT = 8
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.uint16: "U16",
}
"""What safetensors calls them."""


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """Describes a tensor in a file. make: returns it, in one piece in host memory."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one index of its first dimension."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that it takes."""
        return self.shape[0] * self.row_bytes


@dataclass(frozen=True, slots=True)
class Content:
    """Describes a slice in a file; see sglang_bridge.weights.manifest.Slice."""

    name: str
    dim: int
    start: int
    length: int
    shape: tuple[int, ...]
    form: Form
    numbers: tuple[StoredNumbers, ...]


def write_file(path: Path, contents: Sequence[Content]) -> File:
    """Write a file whose name is new; on return it is on the disk. OSError: it cannot be."""
    head = _head([numbers for content in contents for numbers in content.numbers])
    at = len(head)
    slices: list[Slice] = []
    with path.open("xb") as stream:
        stream.write(head)
        for c in contents:
            arrays: list[Array] = []
            for numbers in c.numbers:
                sums: list[int] = []
                for chunk in _chunks(numbers):
                    sums.append(checksum(chunk))
                    stream.write(chunk)
                arrays.append(Array(at, numbers.shape[0], numbers.row_bytes, tuple(sums)))
                at += numbers.num_bytes
            slices.append(Slice(c.name, c.dim, c.start, c.length, c.shape, c.form, tuple(arrays)))
        stream.flush()
        os.fsync(stream.fileno())
    sync_directory(path.parent)
    return File(path.name, at, len(head), checksum(head), tuple(slices))


def _head(announced: Sequence[StoredNumbers]) -> bytes:
    """Return a safetensors file's length of the header, and the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for numbers in announced:
        offsets = [end, end + numbers.num_bytes]
        header[numbers.key] = {
            "dtype": DTYPES[numbers.dtype],
            "shape": list(numbers.shape),
            "data_offsets": offsets,
        }
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _chunks(numbers: StoredNumbers) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, those that share a checksum together."""
    tensor = numbers.make()
    if (tensor.dtype, tuple(tensor.shape)) != (numbers.dtype, numbers.shape):
        raise RuntimeError(f"{numbers.key} was announced otherwise")
    data = tensor.view(-1).view(torch.uint8).numpy().data
    step = rows_of_chunk(numbers.row_bytes) * numbers.row_bytes
    for first in range(0, len(data), step):
        yield data[first : first + step]
