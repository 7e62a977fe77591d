"""Describes the mixture of experts Mixtral."""

from __future__ import annotations

from megatron_opd.models.families.family import (
    ATTENTION,
    BLOCK,
    COMMON,
    POST_NORM,
    Family,
    expert_rows,
)

_EXPERTS = expert_rows(f"{BLOCK}.gate", f"{BLOCK}.experts.{{e}}", "w1", "w3", "w2")

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (*ATTENTION, POST_NORM, *_EXPERTS),
    moe=True,
    expert_ffn_key="intermediate_size",
    experts_keys=("num_local_experts", "num_experts"),
    sums_topk_to_one=True,
    end_token=2,
    defaults={
        **COMMON,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    theta=1e6,
    window="limit",
)
