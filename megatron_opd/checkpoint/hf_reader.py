"""Reads slices of the tensors of a Hugging Face checkpoint, without mapping them.

A memory map would also do, but the pages it touches count as this process's own until the system
needs them back, and a converter promises a bound.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megatron_opd.checkpoint.hf_files import (
    INDEX,
    ITEM_BYTES,
    SINGLE,
    StoredTensor,
    check_dtype,
    check_shape,
    find,
    stored_tensors,
)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsSource:
    """Reads a Hugging Face checkpoint: one model.safetensors, or several with an index.

    ValueError: see hf_files.stored_tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = stored_tensors(path)

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
        stored = find(self.tensors, name)
        if stored is None:
            raise ValueError(f"checkpoint {self.path} lacks the tensor {name}")
        check_shape(stored, shape, self.path, name)
        check_dtype(stored, self.path, name)
        if dim > 0:
            # Strided in the file: the rows are read whole.
            return read_rows(stored, 0, shape[0]).narrow(dim, start, length)
        return read_rows(stored, start, length)

    def dtype_of(self, name: str) -> torch.dtype:
        """Tell the type of a tensor that exists."""
        stored = find(self.tensors, name)
        assert stored is not None, name
        return DTYPES[stored.dtype]


def read_rows(stored: StoredTensor, start: int, length: int) -> torch.Tensor:
    """Read rows [start, start + length) of dimension 0, into memory of their own.

    ValueError: the file ends before they do.
    """
    shape = (length, *stored.shape[1:])
    out = torch.empty(shape, dtype=DTYPES[stored.dtype])
    if out.numel() == 0:
        return out
    row_bytes = out[0].numel() * ITEM_BYTES[stored.dtype]
    view = out.view(-1).view(torch.uint8).numpy().data
    position, done = stored.offset + start * row_bytes, 0
    with stored.file.open("rb", buffering=0) as stream:
        while done < len(view):
            count = os.preadv(stream.fileno(), [view[done:]], position + done)
            if count == 0:
                raise ValueError(f"{stored.file} ends before its tensors do")
            done += count
    return out
