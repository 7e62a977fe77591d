"""Keeps the tensors of published checkpoints that no text goes through.

Layers of multi-token prediction and vision towers (Family.carried): no learner or server of text
reads them, and what is made of a checkpoint has them all the same, so that it is one of the
published class. Every byte stays; what is quantised is written as bfloat16, as nothing here writes
the format that config.json would have to name. A Megatron checkpoint has them in a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

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


def layout_of(
    tensors: Mapping[str, StoredTensor],
) -> Layout:
    """Return type and shape of each tensor as `read_carried` gives it."""
    return {name: (_dtype(each), each.shape) for name, each in tensors.items()}


def carried_bytes(stored: StoredTensor) -> int:
    """Count the bytes of a tensor as `read_carried` gives it."""
    return torch.Size(stored.shape).numel() * _dtype(stored).itemsize


def read_carried(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Read one tensor after another. ValueError: a file ends before its tensors do."""
    for name, stored in tensors.items():
        yield name, read_whole(stored).to(_dtype(stored))


def _dtype(stored: StoredTensor) -> torch.dtype:
    return torch.bfloat16 if isinstance(stored, CodedTensor) else DTYPES[stored.dtype]
