"""Keeps the tensors of published checkpoints that no text goes through.

Layers of multi-token prediction and vision towers (Family.carried): no learner or server of text
reads them, and what is made of a checkpoint has them all the same, so that it is one of the
published class. Every byte stays; what is quantised is written as bfloat16, as nothing here writes
the format that config.json would have to name. A Megatron checkpoint has them in a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from megatron_opd.checkpoint.conversion import grouped
from megatron_opd.checkpoint.hf_files import (
    CodedTensor,
    StoredTensor,
    check_dtype,
    file_tensors,
)
from megatron_opd.checkpoint.hf_formats import model_tensors
from megatron_opd.checkpoint.hf_reader import DTYPES, SafetensorsSource, read_whole
from megatron_opd.checkpoint.hf_writer import Layout
from megatron_opd.models.spec import ModelSpec

CARRIED = "carried.safetensors"
"""Name of the file in a Megatron checkpoint."""


def carried_tensors(path: Path, spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return the tensors to be kept of a checkpoint in either format; none without weights.

    ValueError: files that are not whole, or a tensor of a type that is not written here.
    """
    if (path / CARRIED).is_file():
        return file_tensors(path / CARRIED)
    if not spec.carried or not SafetensorsSource.exists(path):
        return {}
    stored = model_tensors(path)
    found = {name: each for name, each in stored.items() if name.startswith(spec.carried)}
    for name, each in found.items():
        check_dtype(each, path, name)
    return found


def layout_of(tensors: Mapping[str, StoredTensor]) -> Layout:
    """Return type and shape of each tensor as `read_carried` gives it."""
    return {name: (_dtype(each), each.shape) for name, each in tensors.items()}


def carried_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """Count the bytes of all of them as `read_carried` gives them."""
    return sum(prod(shape) * dtype.itemsize for dtype, shape in layout_of(tensors).values())


def carried_units(tensors: Mapping[str, StoredTensor], limit: int) -> list[dict[str, StoredTensor]]:
    """Cut them into units of at most `limit` bytes, or one larger tensor."""
    sizes = [carried_bytes({name: each}) for name, each in tensors.items()]
    units = grouped(tensors, sizes, [0] * len(sizes), limit)
    return [{name: tensors[name] for name in unit} for unit in units]


def read_carried(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Read one tensor after another. ValueError: a file ends before its tensors do."""
    for name, stored in tensors.items():
        yield name, read_whole(stored).to(_dtype(stored))


def _dtype(stored: StoredTensor) -> torch.dtype:
    return torch.bfloat16 if isinstance(stored, CodedTensor) else DTYPES[stored.dtype]
