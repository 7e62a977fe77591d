"""Describes Qwen3.5 and Qwen3.6, whose layers are gated delta nets but for every fourth."""

from __future__ import annotations

from megatron_opd.models.families.family import (
    COMMON,
    DENSE_MLP,
    MIXED_ATTENTION,
    POST_NORM,
    Family,
)

_MIXED = {
    **COMMON,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    (*MIXED_ATTENTION, POST_NORM, *DENSE_MLP),
    qk_norm=True,
    zero_centred_norms=True,
    output_gate=True,
    defaults=_MIXED,  # of num_key_value_heads transformers and SGLang have another one each
    rotary_share=0.25,
    rope_types=("default",),
    # text has one position a token, so that all three of a section are the same
    rope_keys=frozenset({"mrope_section", "mrope_interleaved"}),
)
