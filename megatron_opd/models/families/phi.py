"""Describes Phi-3, Phi-4 and what else is of their class, whose files hold fused projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_opd.config.wording import shown
from megatron_opd.models.families.family import (
    ATTENTION,
    COMMON,
    DENSE_MLP,
    POST_NORM,
    PROJECTIONS,
    Family,
    Packed,
)


def _check(config: Mapping[str, Any]) -> None:
    """Raise ValueError for what transformers refuses, or SGLang 0.5.23 does not find."""
    if config.get("original_max_position_embeddings", 1) is None:
        raise ValueError("original_max_position_embeddings must be a number or left out, got null")
    for key in ("rope_parameters", "rope_scaling"):
        settings: Any = config.get(key) or {}
        if not isinstance(settings, dict) or "partial_rotary_factor" not in settings:
            continue
        share, outside = settings["partial_rotary_factor"], config.get("partial_rotary_factor", 1)
        if share != outside:
            raise ValueError(
                f"partial_rotary_factor of {key} must stand in config.json itself too, where "
                f"SGLang 0.5.23 reads it and transformers in {key}, got {shown(share)} and "
                f"{shown(outside)}"
            )


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    (*ATTENTION, POST_NORM, *DENSE_MLP),
    packed=(
        Packed("self_attn.qkv_proj.weight", PROJECTIONS[0].hf),
        Packed("mlp.gate_up_proj.weight", DENSE_MLP[0].hf),
    ),
    end_token=32000,
    defaults={
        **COMMON,
        "max_position_embeddings": 4096,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    rope_types=("default",),
    rotary_share=1.0,
    window="limit",
    check=_check,
)
