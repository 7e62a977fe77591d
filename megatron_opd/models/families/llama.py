"""Describes Llama 2 and 3."""

from __future__ import annotations

from megatron_opd.models.families.family import (
    ATTENTION,
    COMMON,
    DENSE_MLP,
    POST_NORM,
    ROPE_TYPES,
    Family,
)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (*ATTENTION, POST_NORM, *DENSE_MLP),
    end_token=2,
    heads_fill_hidden=True,
    defaults={**COMMON, "max_position_embeddings": 2048, "num_key_value_heads": None},
    allowed={"attention_bias": (True,)},
    rope_types=(*ROPE_TYPES, "yarn"),
)
