"""Parameters counted from config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.models.spec import read_model_spec
from megatron_opd.sizing.parameters import model_parameters
from megatron_opd.sizing.served import size_of
from tests.support.published import spec_of


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen3-1.7B", 1.72e9, 1.72e9),
        ("Qwen3-30B-A3B", 30.5e9, 3.3e9),
        ("Qwen3-235B-A22B", 235e9, 22e9),
    ],
)
def test_published_sizes(name: str, total: float, active: float):
    spec = spec_of(name)
    assert model_parameters(spec).total == pytest.approx(total, rel=0.01)
    # published with two digits
    assert size_of(spec).active_parameters == pytest.approx(active, rel=0.02)


FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-0.5B": (
        {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        494_032_768,
    ),
    "Llama-3.1-8B": (
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        8_030_261_248,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "model_type": "qwen2_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        14_315_784_192,
    ),
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_counted_exactly(name: str, tmp_path: Path):
    tree, expected = FAMILIES[name]
    shared = {"max_position_embeddings": 8192, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(tree | shared))
    assert model_parameters(read_model_spec(tmp_path)).total == expected
