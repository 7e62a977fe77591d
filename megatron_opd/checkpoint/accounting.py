"""Counts and hashes the numbers of a checkpoint, in either format, for `opd convert --verify`.

Nothing here knows how a parameter is named, cut or fused in the other format: what a conversion
left out, doubled or changed shows, whatever planned it. One stored tensor is in memory at a time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from megatron_opd.checkpoint.digest import Numbers
from megatron_opd.checkpoint.hf_files import IGNORED, CodedTensor
from megatron_opd.checkpoint.hf_formats import model_tensors
from megatron_opd.checkpoint.hf_reader import converted_dtype, read_rows
from megatron_opd.checkpoint.megatron_reader import EMBEDDING, HEAD, MegatronSource
from megatron_opd.models.families.family import EXPERT_BIAS
from megatron_opd.models.spec import ModelSpec


def hf_numbers(path: Path, spec: ModelSpec, dtype: torch.dtype | None) -> Numbers:
    """Return the numbers of a Hugging Face checkpoint's model, cast to `dtype`.

    None: as they are, and in bfloat16 where the checkpoint is quantised.
    """
    found, stored, dtype = Numbers(), model_tensors(path), converted_dtype(path, dtype)
    coded = {name: each for name, each in stored.items() if isinstance(each, CodedTensor)}
    for name, each in coded.items():
        if name.startswith(spec.carried):
            continue
        found = found.plus(_cast(read_rows(each, 0, each.shape[0]), dtype))
    for file in sorted({each.file for each in stored.values()}):
        with safe_open(file, framework="pt") as tensors:  # pyright: ignore[reportUnknownVariableType]
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                unread = name.endswith(IGNORED) or name.startswith(spec.carried)
                unread |= spec.tied and name == "lm_head.weight"
                if not unread and name in stored and name not in coded:
                    kept = name.endswith(_buffer_names(spec))
                    found = found.plus(_cast(tensors.get_tensor(name), None if kept else dtype))
    return found


def megatron_numbers(path: Path, spec: ModelSpec, dtype: torch.dtype | None) -> Numbers:
    """Return the numbers of a Megatron checkpoint, without the rows that pad its vocabulary."""
    stored, found = MegatronSource(path, spec), Numbers()
    for key in stored.model_tensors:
        is_head = key.endswith(HEAD)
        if spec.tied and is_head:
            continue
        for offset, piece in stored.stored_pieces(key):
            if is_head or key.endswith(EMBEDDING):
                piece = piece[: max(0, spec.vocab_size - offset[0])]
            found = found.plus(_cast(piece, None if key.endswith(EXPERT_BIAS) else dtype))
    return found


def _buffer_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the ends of the names of tensors that no conversion casts."""
    return tuple(name for row in spec.family.layer if row.buffer for name in row.hf)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)
