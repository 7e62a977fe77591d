"""Reads slices of the tensors of a Hugging Face checkpoint, without mapping them.

A memory map would also do, but the pages it touches count as this process's own until the system
needs them back, and a converter promises a bound.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from megatron_opd.checkpoint.hf_files import (
    DTYPE_BITS,
    INDEX,
    SINGLE,
    CodedTensor,
    StoredTensor,
    check_dtype,
    check_shape,
)
from megatron_opd.checkpoint.hf_formats import format_of, model_tensors
from megatron_opd.checkpoint.packing import part_of
from megatron_opd.models.places import Place, places
from megatron_opd.models.spec import ModelSpec
from sglang_bridge.weights.dequantise import from_fp8, from_mxfp4

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CODED = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}


class SafetensorsSource:
    """Reads a Hugging Face checkpoint: one model.safetensors, or several with an index.

    Quantised tensors are de-quantised as they are read. ValueError: see hf_files.stored_tensors and
    hf_formats.model_tensors.
    """

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path = path
        self.tensors = model_tensors(path)
        self._places = places(spec, self.tensors)

    @staticmethod
    def exists(path: Path) -> bool:
        """Return whether `path` holds weights."""
        return any((path / name).exists() for name in (SINGLE, INDEX))

    def read(
        self, name: str, shape: tuple[int, ...], dim: int, start: int, length: int
    ) -> torch.Tensor:
        """Read one slice of a tensor.

        ValueError: the tensor is missing, or has another shape or a wrong dtype.
        """
        place = self._places.get(name)
        if place is None or place.name not in self.tensors:
            missing = name if place is None else place.name
            raise ValueError(f"checkpoint {self.path} lacks the tensor {missing}")
        assert place.part == shape, (name, place.part, shape)
        stored = self.tensors[place.name]
        check_shape(stored, place.shape, self.path, place.name)
        check_dtype(stored, self.path, place.name)
        return _read_slice(stored, place, dim, start, length)

    def dtype_of(self, name: str) -> torch.dtype:
        """Tell the type of a tensor that exists."""
        return DTYPES[self.tensors[self._places[name].name].dtype]


def _read_slice(
    stored: StoredTensor, place: Place, dim: int, start: int, length: int
) -> torch.Tensor:
    """Read [start, start + length) of dimension `dim` of the tensor that lies at `place`.

    Of a file only a range of rows is read. What is strided within it is taken from that.
    """
    if place.index is not None and isinstance(stored, CodedTensor):
        whole = read_rows(stored, place.index, 1)[0]
        return part_of(whole, replace(place, index=None)).narrow(dim, start, length)
    if place.index is not None:
        one = replace(stored, shape=stored.shape[1:])
        stored = replace(one, offset=one.offset + place.index * one.num_bytes)
    if place.transposed and dim == 1:
        rows = read_rows(stored, start, length)
        return part_of(rows, replace(place, index=None))
    if place.transposed:
        rows = read_rows(stored, 0, stored.shape[0])
        return part_of(rows, replace(place, index=None)).narrow(0, start, length)
    first, count = (start, length) if dim == 0 else (0, place.part[0])
    if count == 0:
        return read_rows(stored, 0, 0)
    span = place.step * (count - 1) + 1
    rows = read_rows(stored, place.start + place.step * first, span)[:: place.step]
    return rows if dim == 0 else rows.narrow(dim, start, length)


def converted_dtype(path: Path, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return what a conversion of the checkpoint casts to: of a quantised one, by default bfloat16.

    None: every tensor keeps its own. ValueError: see hf_formats.format_of.
    """
    return torch.bfloat16 if dtype is None and format_of(path) is not None else dtype


def read_rows(stored: StoredTensor, start: int, length: int) -> torch.Tensor:
    """Read rows [start, start + length) of dimension 0, into memory of their own.

    Of a quantised tensor no more is read than these rows and their scales. ValueError: the file
    ends before they do.
    """
    if isinstance(stored, CodedTensor):
        numbers = read_rows(stored.numbers, start, length)
        if stored.format.method == "mxfp4":
            return from_mxfp4(numbers, read_rows(stored.scales, start, length))
        return _fp8_rows(stored, numbers, start)
    shape = (length, *stored.shape[1:])
    out = torch.empty(shape, dtype=(DTYPES | _CODED)[stored.dtype])
    if out.numel() == 0:
        return out
    row_bytes = out[0].numel() * DTYPE_BITS[stored.dtype] // 8
    view = out.view(-1).view(torch.uint8).numpy().data
    position, done = stored.offset + start * row_bytes, 0
    with stored.file.open("rb", buffering=0) as stream:
        while done < len(view):
            count = os.preadv(stream.fileno(), [view[done:]], position + done)
            if count == 0:
                raise ValueError(f"{stored.file} ends before its tensors do")
            done += count
    return out


def read_whole(stored: StoredTensor) -> torch.Tensor:
    """Read a tensor, which may be a scalar. ValueError as read_rows."""
    if stored.shape:
        return read_rows(stored, 0, stored.shape[0])
    return read_rows(replace(stored, shape=(1,)), 0, 1)[0]


def _fp8_rows(stored: CodedTensor, numbers: torch.Tensor, start: int) -> torch.Tensor:
    """Return the rows that begin at `start`, de-quantised."""
    height = stored.format.block[0]
    first, end = start // height, -(-(start + len(numbers)) // height)
    scales = read_rows(stored.scales, first, end - first)
    return from_fp8(numbers, scales, stored.format.block, start - first * height)
