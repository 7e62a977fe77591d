"""Tiny random checkpoints whose layers are gated delta nets but for some, as published."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from tests.support.models import _randomise, _save, _shared_config

EVERY = 2
"""Attention is in every second layer, not in every fourth, so that four layers have both twice."""
MIXED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
PUBLISHED: dict[str, Any] = {
    "full_attention_interval": EVERY,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "partial_rotary_factor": 0.25,
}
"""Keys of published files that transformers does not write."""


def tiny_qwen3_5(path: Path, **options: Any) -> Path:
    """Writes a random dense Qwen3.5 checkpoint (float32): a delta net, then attention."""
    return _written(path, Qwen3_5TextConfig, Qwen3_5ForCausalLM, {}, options)


def tiny_qwen3_5_moe(path: Path, **options: Any) -> Path:
    """Writes a random Qwen3.5-MoE checkpoint (float32, 4 experts, top-2, a shared one)."""
    given = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    given |= {"shared_expert_intermediate_size": 32}
    return _written(path, Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, given, options)


def published_dense_qwen3_5(path: Path, **options: Any) -> Path:
    """Writes a random dense Qwen3.5 checkpoint of the published class."""
    return published_qwen3_5(tiny_qwen3_5(path / "text", **options), path)


def published_qwen3_5_moe(path: Path, **options: Any) -> Path:
    """Writes a random Qwen3.5-MoE checkpoint of the published class."""
    return published_qwen3_5(tiny_qwen3_5_moe(path / "text", **options), path)


VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def published_qwen3_5(text: Path, path: Path) -> Path:
    """Writes the checkpoint `text` as one of the published class: `path`, with a vision tower.

    Experts are stacked, as in published files.
    """
    inner = json.loads((text / "config.json").read_text())
    language = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
    kind = type(language).__name__.removesuffix("ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(
        text_config=inner, vision_config=VISION, tie_word_embeddings=inner["tie_word_embeddings"]
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float()
    _randomise(model, 11, 1.0)
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.lm_head.load_state_dict(language.lm_head.state_dict())
    _save(model, path, inner["vocab_size"])
    outer = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(outer | {"text_config": inner}))
    held = model.state_dict()
    if inner["tie_word_embeddings"]:
        del held["lm_head.weight"]
    save_file(held, path / "model.safetensors", {"format": "pt"})
    return path


def _written(
    path: Path, config: Any, model: Any, given: dict[str, Any], options: dict[str, Any]
) -> Path:
    """Writes a checkpoint whose config.json has the keys of published ones.

    options: seed, head_std, and fields of `config`.
    """
    seed, head_std = options.pop("seed", 0), options.pop("head_std", 2.0)
    fields = _shared_config(rope_parameters=ROPE) | MIXED | given | options
    kinds = [
        "linear_attention" if (layer + 1) % EVERY else "full_attention"
        for layer in range(int(fields["num_hidden_layers"]))  # type: ignore[call-overload]
    ]
    made = model(config(**fields | {"layer_types": kinds})).float()
    _randomise(made, seed, head_std)
    _set_apart(made, seed)
    _save(made, path, made.config.vocab_size)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | PUBLISHED))
    return path


def _set_apart(model: PreTrainedModel, seed: int) -> None:
    """Norms that multiply by 1 + weight around 0; decays that remember some ten positions."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                parameter.copy_(0.1 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(0.5 * noise - 2)
            elif name.endswith("dt_bias"):
                parameter.copy_(0.3 * noise)
