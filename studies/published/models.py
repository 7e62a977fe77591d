"""Describes the models of the published runs, as their config.json on Hugging Face does."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_opd.models.spec import ModelSpec, read_model_spec

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # max_position_embeddings: as verl's script tells its user to set it
    "Qwen2.5-Math-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "Qwen3-1.7B": QWEN3
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
    },
    "Qwen3-4B": QWEN3
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": QWEN3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}


def model_spec(name: str) -> ModelSpec:
    """Read the description of a model. KeyError: there is none of this name."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
        return read_model_spec(Path(folder))
