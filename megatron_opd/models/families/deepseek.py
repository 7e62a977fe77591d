"""Describes DeepSeek-V2-Lite and V3, and what is built alike: Moonlight, Kimi-K2, GLM-4.7-Flash.

Published files of V3 and GLM hold a layer of multi-token prediction besides, as layer
num_hidden_layers. Neither transformers nor a server that drafts nothing reads it; conversions and
exports keep it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_opd.config.wording import shown
from megatron_opd.models.families.family import (
    COMMON,
    DENSE_MLP,
    LATENT_ATTENTION,
    NEXT_LAYERS,
    POST_NORM,
    Family,
    bias_row,
    expert_rows,
    shared_expert_rows,
)

_EXPERTS = ("mlp.gate", "mlp.experts.{e}", "gate_proj", "up_proj", "down_proj")
_SHARED = shared_expert_rows("mlp.shared_experts")
_BIAS = bias_row("mlp.gate.e_score_correction_bias")
_LATENT = {
    **COMMON,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _require(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError unless the keys, which SGLang asks for, have these values."""
    for key, value in wanted.items():
        if config.get(key) != value:
            raise ValueError(
                f"{key} must be {value!r}, as SGLang reads it and transformers does not, got "
                f"{shown(config.get(key))}"
            )


def _check_heads(config: Mapping[str, Any]) -> None:
    turning = config["qk_rope_head_dim"]
    heads = config.get("head_dim", turning)  # to transformers a second name of it: null is none
    if heads != turning:
        raise ValueError(
            f"head_dim must be left out, or be qk_rope_head_dim, got {shown(heads)} and "
            f"{shown(turning)}"
        )


def _check_v2(config: Mapping[str, Any]) -> None:
    _check_heads(config)
    _require(
        config, {"scoring_func": "softmax", "moe_layer_freq": 1, "n_group": 1, "topk_group": 1}
    )
    if config["topk_method"] != "greedy":
        raise ValueError(
            f"topk_method must be 'greedy', as in V2-Lite, got {shown(config['topk_method'])}: "
            "the learner's router ranks no groups of experts by their best one"
        )
    for key, value in (("norm_topk_prob", False), ("routed_scaling_factor", 1)):
        if config[key] != value:
            raise ValueError(f"{key} must be {value}, as in V2-Lite, got {shown(config[key])}")


def _check_v3(config: Mapping[str, Any]) -> None:
    _check_heads(config)
    _require(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})


def _check_glm(config: Mapping[str, Any]) -> None:
    _check_heads(config)
    _require(config, {"topk_method": "noaux_tc", "first_k_dense_replace": 1})
    if config["num_key_value_heads"] is None:
        raise ValueError(
            "num_key_value_heads must be an integer, got None: transformers refuses the file"
        )
    layers, count = config.get("mlp_layer_types"), config["num_hidden_layers"]
    if layers is not None and layers != ["dense"] + ["sparse"] * (count - 1):
        raise ValueError(
            "mlp_layer_types must name one dense layer, and sparse ones after it, as SGLang reads "
            f"first_k_dense_replace alone, got {shown(layers)}"
        )


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    (*LATENT_ATTENTION, POST_NORM, *expert_rows(*_EXPERTS), *_SHARED, *DENSE_MLP),
    qk_norm=True,
    moe=True,
    experts_keys=("n_routed_experts", "num_experts"),
    end_token=2,
    heads_fill_hidden=True,
    defaults={
        **_LATENT,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    reads=frozenset({"n_shared_experts"}),
    rope_types=("default", "yarn"),
    check=_check_v2,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (*LATENT_ATTENTION, POST_NORM, *expert_rows(*_EXPERTS), _BIAS, *_SHARED, *DENSE_MLP),
    qk_norm=True,
    moe=True,
    experts_keys=("n_routed_experts", "num_local_experts"),
    end_token=1,
    defaults={
        **_LATENT,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    reads=frozenset({"n_shared_experts"}),
    rope_types=("default", "yarn"),
    carried=NEXT_LAYERS,
    check=_check_v3,
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    layer=(
        *LATENT_ATTENTION,
        POST_NORM,
        *expert_rows(*_EXPERTS, exact=True),
        _BIAS,
        *_SHARED,
        *DENSE_MLP,
    ),
    defaults={
        **_LATENT,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "num_key_value_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
    rope_types=("default",),
    check=_check_glm,
)
