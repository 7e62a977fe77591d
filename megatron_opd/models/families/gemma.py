"""Describes the text models of Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_opd.config.wording import shown
from megatron_opd.models.families.family import (
    ADDED_NORMS,
    ATTENTION,
    DENSE_MLP,
    QK_NORM,
    Family,
    Row,
)

_MLP_NORM = Row(
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("pre_feedforward_layernorm.weight",),
)
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (False, None),
    "attn_logit_softcapping": (None,),
}
"""Values beyond which SGLang 0.5.23, transformers and the learner compute different models."""


def _check(config: Mapping[str, Any]) -> None:
    for key, allowed in _FIXED.items():
        if config.get(key) not in allowed:
            raise ValueError(f"{key} must be {allowed[0]!r}, got {shown(config.get(key))}")
    for key in ("sliding_window", "num_key_value_heads", "head_dim", "query_pre_attn_scalar"):
        if config[key] is None:
            raise ValueError(f"{key} must be an integer in a gemma3_text model, got None")


GEMMA3_TEXT = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (*ATTENTION, *QK_NORM, _MLP_NORM, *DENSE_MLP, *ADDED_NORMS),
    qk_norm=True,
    post_norm=True,
    end_token=1,
    heads_fill_hidden=True,
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    theta=1e6,
    allowed={"hidden_act": (None, "gelu_pytorch_tanh")},
    rope_types=("default", "linear"),
    zero_centred_norms=True,
    gelu=True,
    scaled_embedding=True,
    window="layers",
    window_theta=1e4,
    shares_heads=False,
    check=_check,
)
