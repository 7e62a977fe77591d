"""One tiny checkpoint for each family that a learner trains, and the layouts that it allows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.delta_models import tiny_qwen3_5, tiny_qwen3_5_moe
from tests.support.latent_models import tiny_deepseek_v2, tiny_deepseek_v3, tiny_glm4_moe_lite
from tests.support.models import (
    YARN_ROPE,
    tiny_gemma3,
    tiny_glm4_moe,
    tiny_gpt_oss,
    tiny_llama,
    tiny_minimax_m2,
    tiny_mistral,
    tiny_mixtral,
    tiny_olmo2,
    tiny_olmo3,
    tiny_phi3,
    tiny_qwen2,
    tiny_qwen2_moe,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_smollm3,
)

DENSE = ("tp2", "pp2", "cp2")
SPARSE = ("tp2 ep2", "pp2", "cp2", "dp2 ep2")
"""Names of tests/dist/layouts.py; with experts, tensor-parallel ranks hold some each."""


@dataclass(frozen=True)
class Student:
    """A checkpoint to be made by `make`, with `fields`, and the layouts of its updates.

    seed: one with which every tensor counts: biases that choose experts may be too small.
    """

    make: Callable[..., Path]
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    layouts: tuple[str, ...] = DENSE
    seed: int = 3


WINDOW = {"sliding_window": 7}
STUDENTS: Mapping[str, Student] = {
    "deepseek_v2": Student(tiny_deepseek_v2, {"num_hidden_layers": 2}, SPARSE),
    "deepseek_v3": Student(tiny_deepseek_v3, {"num_hidden_layers": 2}, SPARSE),
    "gemma3_text": Student(tiny_gemma3, WINDOW),
    "glm4_moe": Student(tiny_glm4_moe, {"num_hidden_layers": 4}, SPARSE, seed=4),
    # transformers normalises latents with 1e-6, whatever rms_norm_eps is
    "glm4_moe_lite": Student(
        tiny_glm4_moe_lite, {"num_hidden_layers": 2, "rms_norm_eps": 1e-6}, SPARSE
    ),
    "gpt_oss": Student(tiny_gpt_oss, WINDOW, SPARSE),
    "llama": Student(tiny_llama, {"attention_bias": True}),
    "minimax_m2": Student(tiny_minimax_m2, {}, SPARSE, seed=4),
    "mistral": Student(tiny_mistral),
    "mixtral": Student(tiny_mixtral, {}, SPARSE),
    "olmo2": Student(tiny_olmo2),
    "olmo3": Student(tiny_olmo3, WINDOW),
    "phi3": Student(tiny_phi3),
    "qwen2": Student(tiny_qwen2),
    "qwen2_moe": Student(tiny_qwen2_moe, {}, SPARSE),
    "qwen3": Student(tiny_qwen3, {"rope_parameters": YARN_ROPE}),
    "qwen3_5_moe_text": Student(tiny_qwen3_5_moe, {}, SPARSE),
    "qwen3_5_text": Student(tiny_qwen3_5),
    "qwen3_moe": Student(tiny_qwen3_moe, {}, SPARSE),
    "smollm3": Student(tiny_smollm3),
}
"""By config.json's model_type."""
