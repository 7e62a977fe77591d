"""Checks whether a checkpoint's safetensors files are complete and agree with its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

from megatron_opd.checkpoint.finite import first_not_finite
from megatron_opd.checkpoint.hf_files import (
    INDEX,
    ITEM_BYTES,
    SINGLE,
    StoredTensor,
    check_complete,
    check_dtype,
    check_shape,
    check_tied,
    find,
    stored_tensors,
    unread_tensors,
)
from megatron_opd.errors import UserError
from megatron_opd.models.families.in_memory import in_memory
from megatron_opd.models.file_kinds import other_kind
from megatron_opd.models.spec import ModelSpec, read_config
from megatron_opd.models.tensors import expected_tensors
from sglang_bridge.errors import some

PLAIN = ("embed_tokens.weight", "norm.weight", "gate.weight", ".bias")
"""Ends of names of tensors that quantised checkpoints hold as they are."""
MODELOPT = "hf_quant_config.json"


def has_weights(path: Path) -> bool:
    """Return whether `path` holds weights, complete or not, as safetensors or otherwise."""
    if other_kind(path) is not None:
        return True
    return (path / INDEX).exists() or (path / SINGLE).exists() or any(path.glob("*.safetensors"))


def check_finite(path: Path, key: str) -> None:
    """Read every weight. Raises UserError naming the tensor that holds a NaN or an infinity."""
    for name, stored in stored_tensors(path).items():
        if (found := first_not_finite(stored)) is not None:
            raise UserError(f"{key}: {path}: tensor {name} holds {found}")


def check_weights(path: Path, key: str, spec: ModelSpec, *, trained: bool = False) -> None:
    """Raise UserError, naming the file or the tensor, when the weights cannot be `spec`'s.

    trained: a learner must be able to take them. Only headers are read, but where two copies of
    something must be equal. A server may be given a quantised checkpoint, whose matrices have names
    and shapes of their format: of those, each needs tensors of its own, and the others are compared
    as always. What then is missing of one, the server itself finds when it loads it.
    """
    try:
        tensors = stored_tensors(path)
        if trained:
            for name in expected_tensors(spec):
                stored = find(tensors, name)
                if stored is not None:
                    check_dtype(stored, path, name)
            if is_quantised(path):
                raise ValueError(
                    f"{path} is described as quantised, which no learner takes: give the "
                    "checkpoint that it was made from"
                )
        if trained or not is_quantised(path):
            check_complete(tensors, spec, path)
            _check_unscaled(tensors, spec, path)
            return
        check_tied(tensors, spec, path)
        owners = {each.rpartition(".")[0] for each in tensors} | tensors.keys()
        for name, shape in expected_tensors(spec).items():
            stored = find(tensors, name)
            if stored is None and not _is_held(owners, name):
                raise ValueError(f"{path} lacks the tensor {name}")
            if stored is not None and name.endswith(PLAIN):
                check_shape(stored, shape, path, name)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None


def _check_unscaled(tensors: Mapping[str, StoredTensor], spec: ModelSpec, path: Path) -> None:
    """Raise ValueError for numbers that mean something only with scales, which are not there."""
    for name in expected_tensors(spec):
        stored = find(tensors, name)
        if stored is not None and stored.dtype not in (*ITEM_BYTES, "F64"):
            raise ValueError(
                f"{path}: tensor {name} is quantised ({stored.dtype}) and config.json has no "
                "quantization_config to say how: give the whole checkpoint, or the one that it "
                "was made from"
            )


def unread_note(path: Path, key: str, spec: ModelSpec) -> str | None:
    """Return a line that names the tensors that no process reads; None: there are none."""
    if not has_weights(path) or is_quantised(path):
        return None
    unread = unread_tensors(stored_tensors(path), spec)
    if not unread:
        return None
    return f"{key}: {path} holds {some(unread)}, which nothing reads and no export will hold"


def is_quantised(path: Path) -> bool:
    """Return whether the checkpoint's matrices are stored in a format of their own."""
    config = read_config(path / "config.json")
    described = any(config.get(key) for key in ("quantization_config", "compression_config"))
    return described or (path / MODELOPT).is_file()


def _is_held(owners: Set[str], name: str) -> bool:
    """Return whether a matrix is there under other last names. owners: all names without those."""
    if not name.endswith(".weight"):
        return False
    other = in_memory(name)
    fused = other is not None and other.name in owners
    return name.removesuffix(".weight") in owners or fused
