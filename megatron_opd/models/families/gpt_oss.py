"""Describes the mixture of experts gpt-oss."""

from __future__ import annotations

from megatron_opd.models.families.family import (
    ATTENTION,
    COMMON,
    POST_NORM,
    ROUTER_BIAS,
    SINKS,
    Family,
    Packed,
    Row,
    expert_rows,
)

_FC = "mlp.experts.local_experts.{e}.linear_fc%d.bias", "mlp.experts.linear_fc%d.bias{e}"
_GATE, _UP, _DOWN = (f"mlp.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down"))
# SGLang holds experts' biases in float32 whatever its dtype
_EXPERT_BIASES = (
    Row(
        tuple(name % 1 for name in _FC),
        (f"{_GATE}.bias", f"{_UP}.bias"),
        0,
        "gate_up",
        expert=True,
        layers="moe",
        exact=True,
    ),
    Row(tuple(name % 2 for name in _FC), (f"{_DOWN}.bias",), expert=True, layers="moe", exact=True),
)

GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *ATTENTION,
        Row((SINKS,), ("self_attn.sinks",), 0),
        POST_NORM,
        *expert_rows("mlp.router", "mlp.experts.{e}", "gate_proj", "up_proj", "down_proj"),
        Row((ROUTER_BIAS,), ("mlp.router.bias",), layers="moe"),
        *_EXPERT_BIASES,
    ),
    moe=True,
    expert_ffn_key="intermediate_size",
    experts_keys=("num_local_experts", "num_experts"),
    sums_topk_to_one=True,
    packed=(
        Packed(
            "mlp.experts.gate_up_proj",
            (f"{_GATE}.weight", f"{_UP}.weight"),
            experts=True,
            transposed=True,
            interleaved=True,
        ),
        Packed(
            "mlp.experts.gate_up_proj_bias",
            (f"{_GATE}.bias", f"{_UP}.bias"),
            experts=True,
            interleaved=True,
        ),
        Packed("mlp.experts.down_proj", (f"{_DOWN}.weight",), experts=True, transposed=True),
        Packed("mlp.experts.down_proj_bias", (f"{_DOWN}.bias",), experts=True),
    ),
    defaults={
        **COMMON,
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "intermediate_size": 2880,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    allowed={"attention_bias": (True,)},
    theta=150000.0,
    rope_types=("yarn",),
    window="layers",
    window_every=2,
)
