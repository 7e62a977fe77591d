"""Checks whether a checkpoint's safetensors files are complete and agree with its config.json."""

from __future__ import annotations

from pathlib import Path

from megatron_opd.checkpoint.finite import first_not_finite
from megatron_opd.checkpoint.hf_files import INDEX, SINGLE, check_shape, find, stored_tensors
from megatron_opd.cli.errors import UserError
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import expected_tensors


def has_weights(path: Path) -> bool:
    """Return whether `path` holds safetensors files, complete or not."""
    return (path / INDEX).exists() or (path / SINGLE).exists() or any(path.glob("*.safetensors"))


def check_finite(path: Path, key: str) -> None:
    """Read every weight. Raises UserError naming the tensor that holds a NaN or an infinity."""
    for name, stored in stored_tensors(path).items():
        if (found := first_not_finite(stored)) is not None:
            raise UserError(f"{key}: {path}: tensor {name} holds {found}")


def check_weights(path: Path, key: str, spec: ModelSpec) -> None:
    """Raise UserError, naming the file or the tensor, when the weights cannot be `spec`'s.

    Only headers are read. A model that is served may be quantised, so only tensors that stay as
    they are, or keep name and shape, are compared: embedding, norms, routers, queries.
    """
    try:
        tensors = stored_tensors(path)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None
    plain = ("embed_tokens.weight", "layernorm.weight", "gate.weight", "q_proj.weight")
    for name, shape in expected_tensors(spec).items():
        if not name.endswith(plain):
            continue
        stored = find(tensors, name)
        if stored is None:
            raise UserError(f"{key}: {path} lacks the tensor {name}")
        try:
            check_shape(stored, shape, path, name)
        except ValueError as error:
            raise UserError(f"{key}: {error}") from None
