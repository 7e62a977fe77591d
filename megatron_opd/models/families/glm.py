"""Describes GLM-4.5 and GLM-4.6, mixtures of experts.

Published files hold a layer of multi-token prediction besides, as layer num_hidden_layers. Neither
transformers nor a server that drafts nothing reads it; conversions and exports keep it.
"""

from __future__ import annotations

from megatron_opd.models.families.family import (
    ATTENTION,
    COMMON,
    DENSE_MLP,
    NEXT_LAYERS,
    POST_NORM,
    QKV_BIAS,
    Family,
    bias_row,
    expert_rows,
    shared_expert_rows,
)

GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (
        *ATTENTION,
        POST_NORM,
        *expert_rows(
            "mlp.gate", "mlp.experts.{e}", "gate_proj", "up_proj", "down_proj", exact=True
        ),
        bias_row("mlp.gate.e_score_correction_bias"),
        *shared_expert_rows("mlp.shared_experts"),
        *DENSE_MLP,
    ),
    moe=True,
    experts_keys=("n_routed_experts", "num_local_experts"),
    defaults={
        **COMMON,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "attention_bias": False,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    allowed={"attention_bias": (True,)},
    reads=frozenset({"n_shared_experts"}),
    optional_biases=(QKV_BIAS,),
    rotary_share=0.5,
    carried=NEXT_LAYERS,
)
