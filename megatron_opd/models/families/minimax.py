"""Describes the mixture of experts MiniMax-M2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_opd.config.wording import shown
from megatron_opd.models.families.family import (
    ATTENTION,
    BLOCK,
    COMMON,
    POST_NORM,
    QK_NORM,
    Family,
    bias_row,
    expert_rows,
)

_HEAD_DIM = 128
_FIXED = {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"}


def check_minimax_m2(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a config.json that SGLang 0.5.23 and transformers read differently.

    transformers always has what SGLang has where a key of _FIXED says so. SGLang turns rotary_dim
    features of a head, transformers the share partial_rotary_factor, or that of rotary_dim where
    nothing names it.
    """
    for key, value in _FIXED.items():
        if config.get(key) != value:
            raise ValueError(
                f"{key} must be {value!r} in a minimax_m2 model, as transformers takes it to be "
                f"and SGLang 0.5.23 does not, got {shown(config.get(key))}"
            )
    if config.get("qk_norm_type", "per_layer") != "per_layer":
        raise ValueError(f"qk_norm_type must be 'per_layer', got {shown(config['qk_norm_type'])}")
    head_dim = config.get("head_dim", _HEAD_DIM)
    turning = config.get("rotary_dim", head_dim)
    if type(head_dim) is not int or type(turning) is not int or not 0 < turning <= head_dim:
        raise ValueError(
            "rotary_dim must be an integer >= 1 and <= head_dim, got "
            f"{shown(turning)} and {shown(head_dim)}"
        )
    places = (config, config.get("rope_scaling"), config.get("rope_parameters"))
    for settings in (each for each in places if isinstance(each, Mapping)):
        share = settings.get("partial_rotary_factor", turning / head_dim)
        if share != turning / head_dim:
            raise ValueError(
                f"partial_rotary_factor must be left out or rotary_dim / head_dim ({turning} / "
                f"{head_dim}) in a minimax_m2 model, because SGLang 0.5.23 reads rotary_dim alone, "
                f"got {shown(share)}"
            )


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    (
        *ATTENTION,
        *QK_NORM,
        POST_NORM,
        *expert_rows(f"{BLOCK}.gate", f"{BLOCK}.experts.{{e}}", "w1", "w3", "w2", exact=True),
        bias_row(f"{BLOCK}.e_score_correction_bias"),
    ),
    qk_norm=True,
    norms_all_heads=True,
    split_norms=True,
    moe=True,
    expert_ffn_key="intermediate_size",
    experts_keys=("num_local_experts", "num_experts"),
    sums_topk_to_one=True,
    end_token=200020,
    defaults={
        **COMMON,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
    },
    theta=5e6,
    rope_types=("default",),
    rotary_share=1.0,
    rotary_dim=True,
    check=check_minimax_m2,
)
