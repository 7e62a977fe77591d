"""Describes Qwen3.5 and Qwen3.6, dense and with experts: gated delta nets, then attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_opd.config.wording import shown
from megatron_opd.models.families.family import (
    COMMON,
    DENSE_MLP,
    MIXED_ATTENTION,
    POST_NORM,
    Family,
    expert_rows,
    shared_expert_rows,
)
from sglang_bridge.language_models import VISION_PREFIX

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


def _check_experts(config: Mapping[str, Any]) -> None:
    """Raise ValueError for weights of experts that transformers scales to a sum of one anyway."""
    if config.get("norm_topk_prob", True) is not True:
        raise ValueError(
            "norm_topk_prob must be true, as transformers reads nothing else and SGLang 0.5.23 "
            f"does, got {shown(config['norm_topk_prob'])}"
        )


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
    carried=("mtp.", VISION_PREFIX),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    layer=(
        *MIXED_ATTENTION,
        POST_NORM,
        *expert_rows("mlp.gate", "mlp.experts.{e}", "gate_proj", "up_proj", "down_proj"),
        *shared_expert_rows("mlp.shared_expert", gate="mlp.shared_expert_gate.weight"),
    ),
    moe=True,
    experts_keys=("num_experts",),
    sums_topk_to_one=True,
    defaults={
        **_MIXED,
        "intermediate_size": 512,  # of dense layers, which there are none of
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    reads=frozenset({"shared_expert_intermediate_size"}),
    check=_check_experts,
)
