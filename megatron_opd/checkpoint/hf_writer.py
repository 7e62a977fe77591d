"""Writes safetensors files one tensor after another: the header needs shapes and dtypes alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_opd.checkpoint.digest import entry_of
from megatron_opd.checkpoint.hf_reader import NAMES

# The format wants the data to begin at a multiple of this.
ALIGNMENT = 8

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each tensor of a file, in its order."""


def write_safetensors(
    file: Path,
    layout: Layout,
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, dict[str, str]]:
    """Write `tensors`, which come in the order of `layout`; on return the file is on the disk.

    Returns {name: entry_of(tensor)}. The file has its name only once it is whole. OSError: for
    example, the disk is full.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    part = file.with_name(f".{file.name}.part")
    wanted, entries = iter(layout.items()), dict[str, dict[str, str]]()
    with part.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            expected, (dtype, shape) = next(wanted)
            if (name, tensor.dtype, tuple(tensor.shape)) != (expected, dtype, shape):
                raise RuntimeError(f"{file}: {expected} was announced, {name} came")
            entries[name] = entry_of(tensor)
            stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())
    part.rename(file)
    return entries
