"""Describes SmolLM3, of which SGLang runs transformers' own modules."""

from __future__ import annotations

from megatron_opd.models.families.family import ATTENTION, COMMON, DENSE_MLP, POST_NORM, Family

SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    (*ATTENTION, POST_NORM, *DENSE_MLP),
    end_token=128001,
    defaults={
        **COMMON,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    theta=2e6,
    shares_heads=False,
    own_modules=True,
)
