"""Checks whether a checkpoint's safetensors files are complete and agree with its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_opd.checkpoint.finite import first_not_finite
from megatron_opd.checkpoint.hf_files import (
    INDEX,
    ITEM_BYTES,
    SINGLE,
    StoredTensor,
    check_complete,
    check_dtype,
    check_tied,
    files_tensors,
    stored_tensors,
    unread_tensors,
)
from megatron_opd.checkpoint.hf_formats import (
    format_of,
    is_quantised,
    model_tensors,
    presented,
    require_known,
)
from megatron_opd.config.teacher import Trust
from megatron_opd.errors import UserError
from megatron_opd.models.file_kinds import other_kind
from megatron_opd.models.spec import ModelSpec
from sglang_bridge.errors import some
from sglang_bridge.weights.checkpoint_formats import CheckpointFormat


def has_weights(path: Path) -> bool:
    """Return whether `path` holds weights, complete or not, as safetensors or otherwise."""
    if other_kind(path) is not None:
        return True
    return (path / INDEX).exists() or (path / SINGLE).exists() or any(path.glob("*.safetensors"))


def check_finite(path: Path, key: str) -> None:
    """Read every weight. Raises UserError naming the tensor that holds a NaN or an infinity."""
    try:
        tensors = model_tensors(path)
    except ValueError:
        tensors = stored_tensors(path)  # of a format that a server alone knows
    for name, stored in tensors.items():
        if (found := first_not_finite(stored)) is not None:
            raise UserError(f"{key}: {path}: tensor {name} holds {found}")


def check_weights(path: Path, key: str, spec: ModelSpec) -> None:
    """Raise UserError, naming the file or the tensor, when no learner can take the weights.

    Only headers are read, but where two copies of something must be equal.
    """
    try:
        require_known(path)
        tensors = model_tensors(path)
        for name in files_tensors(tensors, spec):
            if name in tensors:
                check_dtype(tensors[name], path, name)
        check_complete(tensors, spec, path)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None


def served_tensors(path: Path, key: str, raw: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return what a server would load, whatever the tensors are called. raw: its config.json.

    Quantised ones are shown as plain ones where their format is known. Whether they are those of
    the model, the server itself finds. Raises UserError: files that are missing or cut short,
    numbers without the scales that they need, a tied head of its own.
    """
    try:
        tensors = stored_tensors(path)
        if is_quantised(path) and (format := known_format(path)) is not None:
            tensors = presented(tensors, format, path)
        check_tied(tensors, path, tied=raw.get("tie_word_embeddings") is True)
        coded = (name for name, each in tensors.items() if each.dtype not in (*ITEM_BYTES, "F64"))
        name = None if is_quantised(path) else next(coded, None)
        if name is not None:
            raise ValueError(
                f"{path}: tensor {name} is quantised ({tensors[name].dtype}) and config.json has "
                "no quantization_config to say how: give the whole checkpoint, or the one that it "
                "was made from"
            )
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None
    return tensors


def unread_note(path: Path, key: str, spec: ModelSpec) -> str | None:
    """Return a line that names the tensors that no process reads; None: there are none."""
    if not has_weights(path):
        return None
    tensors = model_tensors(path)
    lines: list[str] = []
    if unread := unread_tensors(tensors, spec):
        lines.append(f"{some(unread)}, which nothing reads and no export will hold")
    if carried := [name for name in tensors if name.startswith(spec.carried)]:
        lines.append(f"{some(carried)}, which no text goes through: exports hold them unchanged")
    return f"{key}: {path} holds {'; and '.join(lines)}" if lines else None


def check_format(path: Path, key: str, trust: Trust) -> None:
    """Raise UserError for a model to be served whose format nobody compared; trust: any allows it.

    A server on a CPU, which has no kernels for such formats, refuses it all the same.
    """
    if trust == "any":
        return
    try:
        require_known(path)
    except ValueError as error:
        raise UserError(
            f"{key}: {error}; on GPUs, trust: any serves it by SGLang's own kernels"
        ) from None


def known_format(path: Path) -> CheckpointFormat | None:
    """Return how the matrices are held; None: as they are, or in a way that a server may know."""
    try:
        return format_of(path)
    except ValueError:
        return None
