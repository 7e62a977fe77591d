"""Reads what the config.json of a checkpoint says, and refuses models that are not supported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opd.config.wording import shown
from megatron_opd.errors import UserError
from megatron_opd.models.families.mixtral import MIXTRAL
from megatron_opd.models.families.table import FAMILIES
from megatron_opd.models.file_kinds import ADAPTER, adapter_line, pointer_in, pointer_line
from megatron_opd.models.spec import ModelSpec, read_config, read_model_spec

SUPPORTED_ARCHITECTURES = tuple(family.architecture for family in FAMILIES.values())


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Holds what a Hugging Face checkpoint's config.json says, as far as the checks need it."""

    path: Path
    architecture: str
    vocab_size: int
    context_length: int
    raw: dict[str, Any]
    spec: ModelSpec


def read_model(path: Path, key: str) -> ModelFacts:
    """Read config.json of a checkpoint; `key` is the config key that named it. Raises UserError."""
    if not path.is_dir():
        found = "got the file" if path.exists() else "not found:"
        raise UserError(f"{key} must be a Hugging Face checkpoint directory, {found} {path}")
    if (path / ADAPTER).is_file():  # transformers would load it on top of what lies beside it
        raise UserError(f"{key}: {adapter_line(path)}")
    pointer = pointer_in(path)
    if pointer is not None:
        raise UserError(f"{key}: {pointer_line(pointer)}")
    try:
        raw = read_config(path / "config.json")
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "none"
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UserError(
            f"{key}: architecture {shown(architecture, 80)} is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    try:
        spec = read_model_spec(path)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None
    if architecture != spec.family.architecture:
        raise UserError(
            f"{key}: {path / 'config.json'}: architectures must be "
            f"[{spec.family.architecture!r}] with model_type {spec.family.name!r}, which "
            f"transformers goes by, got {architecture!r}, which SGLang would serve"
        )
    check_servable(key, spec)
    return ModelFacts(path, architecture, spec.vocab_size, spec.longest_context, raw, spec)


def check_servable(key: str, spec: ModelSpec) -> None:
    """Check that SGLang serves the model that config.json describes. Raises UserError.

    Where its version here ignores a key, it would serve another model, or parameters that were
    never loaded.
    """
    dense = [layer for layer, moe in enumerate(spec.moe_layers) if not moe]
    if spec.is_moe and dense and "mlp_only_layers" in spec.family.defaults:
        raise UserError(
            f"{key} must have experts in every layer, because SGLang 0.5.23 ignores "
            f"mlp_only_layers and decoder_sparse_step; layer {dense[0]} of config.json is dense"
        )
    wrong = None
    if spec.is_moe and spec.tied:
        wrong = "tie_word_embeddings must be false", "true"
    elif spec.family == MIXTRAL and spec.rope.type != "default":
        wrong = "the rope type must be default", spec.rope.type
    elif spec.family == MIXTRAL and not spec.rope.theta.is_integer():
        wrong = "rope_theta must be a whole number", spec.rope.theta
    elif spec.family == MIXTRAL and spec.head_dim * spec.num_heads != spec.hidden_size:
        wrong = "head_dim must be hidden_size / num_attention_heads", spec.head_dim
    if wrong is not None:
        rule, got = wrong
        raise UserError(
            f"{key}: {rule} in a {spec.family.name} model, because SGLang 0.5.23 serves it as if "
            f"it were, got {got}"
        )
