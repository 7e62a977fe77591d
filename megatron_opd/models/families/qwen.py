"""Describes Qwen 1.5 (with experts), 2, 2.5 and 3, dense and with experts."""

from __future__ import annotations

from megatron_opd.models.families.family import (
    ATTENTION,
    COMMON,
    DENSE_MLP,
    POST_NORM,
    QK_NORM,
    QKV_BIAS,
    ROPE_TYPES,
    Family,
    expert_rows,
    shared_expert_rows,
)

_EXPERTS = expert_rows("mlp.gate", "mlp.experts.{e}", "gate_proj", "up_proj", "down_proj")
_QWEN = {**COMMON, "max_position_embeddings": 32768, "use_sliding_window": False}
_QWEN |= {"sliding_window": 4096}
_WINDOW = {"use_sliding_window": (True,)}

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (*ATTENTION, QKV_BIAS, POST_NORM, *DENSE_MLP),
    qkv_bias=True,
    defaults={**_QWEN, "num_key_value_heads": 32},
    allowed=_WINDOW,
    rope_types=(*ROPE_TYPES, "yarn"),
    window="limit",
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (*ATTENTION, *QK_NORM, POST_NORM, *DENSE_MLP),
    qk_norm=True,
    defaults={**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    allowed={**_WINDOW, "attention_bias": (True,)},
    rope_types=(*ROPE_TYPES, "yarn"),
    window="limit",
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *ATTENTION,
        QKV_BIAS,
        POST_NORM,
        *_EXPERTS,
        *shared_expert_rows("mlp.shared_expert", gate="mlp.shared_expert_gate.weight"),
        *DENSE_MLP,
    ),
    qkv_bias=True,
    moe=True,
    experts_keys=("num_experts",),
    defaults={
        **_QWEN,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    reads=frozenset({"shared_expert_intermediate_size"}),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (*ATTENTION, *QK_NORM, POST_NORM, *_EXPERTS, *DENSE_MLP),
    qk_norm=True,
    moe=True,
    defaults={
        **_QWEN,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    allowed=_WINDOW,
    rope_types=(*ROPE_TYPES, "yarn"),
    window="limit",
)
