"""Describes DeepSeek-V2 and V3, and what is built alike: Moonlight, Kimi-K2, GLM-4.7-Flash."""

from __future__ import annotations

from megatron_opd.models.families.family import (
    COMMON,
    DENSE_MLP,
    LATENT_ATTENTION,
    POST_NORM,
    Family,
)

_LATENT = {**COMMON, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
_LATENT |= {"v_head_dim": 128}

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    (*LATENT_ATTENTION, POST_NORM, *DENSE_MLP),
    qk_norm=True,
    end_token=2,
    heads_fill_hidden=True,
    defaults={
        **_LATENT,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "q_lora_rank": 1536,
    },
    allowed={"n_shared_experts": (1, 2)},
    rope_types=("default", "yarn"),
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (*LATENT_ATTENTION, POST_NORM, *DENSE_MLP),
    qk_norm=True,
    end_token=1,
    defaults={
        **_LATENT,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "rope_interleave": True,
    },
    allowed={"n_shared_experts": (1, 2)},
    rope_types=("default", "yarn"),
)
