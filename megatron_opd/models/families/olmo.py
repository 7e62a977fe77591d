"""Describes OLMo 2 and OLMo 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_opd.config.wording import shown
from megatron_opd.models.families.family import (
    ADDED_NORMS,
    COMMON,
    DENSE_MLP,
    PROJECTIONS,
    QK_NORM,
    ROPE_TYPES,
    Family,
)


def _check_heads(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a head_dim that SGLang 0.5.23 ignores."""
    size = config["hidden_size"] // config["num_attention_heads"]
    if config.get("head_dim", size) != size:
        raise ValueError(
            f"head_dim must be hidden_size / num_attention_heads, which SGLang 0.5.23 takes it to "
            f"be, got {shown(config['head_dim'])}"
        )


def _check_olmo2(config: Mapping[str, Any]) -> None:
    _check_heads(config)
    if "sliding_window" in config:
        raise ValueError(
            "sliding_window must be absent in an olmo2 model: SGLang 0.5.23 computes with whatever "
            f"it says, null too, got {shown(config['sliding_window'])}"
        )


def _check_olmo3(config: Mapping[str, Any]) -> None:
    """Raise ValueError for rotary settings of which SGLang's own configuration class knows nothing.

    It reads rope_theta, for all layers, and rope_scaling. transformers gives windowed layers their
    default of rope_theta.
    """
    _check_heads(config)
    if config["sliding_window"] is None:
        raise ValueError("sliding_window must be an integer in an olmo3 model, got None")
    if config.get("rope_parameters"):
        raise ValueError(
            "rope_parameters must be absent in an olmo3 model, because SGLang 0.5.23 ignores it: "
            "write rope_theta and rope_scaling, as published files have them, got "
            f"{shown(config['rope_parameters'])}"
        )
    if config.get("rope_theta") != 500000:
        raise ValueError(
            "rope_theta must be 500000 in an olmo3 model, because transformers computes windowed "
            f"layers with that, SGLang with rope_theta, got {shown(config.get('rope_theta'))}"
        )
    scaling = config.get("rope_scaling") or {}
    for key in ("rope_theta", "truncate", "type"):
        if key in scaling:
            raise ValueError(
                f"{key} must not stand in rope_scaling of an olmo3 model, where transformers or "
                f"SGLang 0.5.23 ignores it, got {shown(scaling[key])}"
            )


_OLMO = {
    **COMMON,
    "max_position_embeddings": 2048,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-5,
}

OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    (*PROJECTIONS, *QK_NORM, *DENSE_MLP, *ADDED_NORMS),
    qk_norm=True,
    norms_all_heads=True,
    pre_norm=False,
    post_norm=True,
    shares_heads=False,
    end_token=50279,
    defaults=_OLMO,
    check=_check_olmo2,
)
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={**_OLMO, "sliding_window": 4096},
    theta=5e5,
    rope_types=(*ROPE_TYPES, "yarn"),
    window="layers",
    plain_window=True,
    check=_check_olmo3,
)
