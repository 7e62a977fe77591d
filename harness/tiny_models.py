"""Says which tiny architectures learner and server are compared on, as config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tree = dict[str, Any]
COMMON: Tree = {
    "vocab_size": 509,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "initializer_range": 0.2,
    "hidden_act": "silu",
}
MODELS: Mapping[str, Tree] = {
    "tied": COMMON
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    # with biases; heads of hidden_size / num_attention_heads
    "biased": COMMON
    | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": 8},
    "moe": COMMON
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
}
