"""Tiny random checkpoints with multi-head latent attention, with config.json files as published."""

import json
from pathlib import Path
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
)

from tests.support.models import _bias_choices, _randomise, _save, _shared_config

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
"""Heads of which queries, values and the part that turns differ in size."""
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
}
MIXTURE: dict[str, Any] = {"ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001}
"""Keys of published files that transformers neither reads nor writes."""


def tiny_deepseek_v2(path: Path, **options: Any) -> Path:
    """Writes a random DeepSeek-V2-Lite checkpoint: queries at full rank, stretched by YaRN."""
    given: dict[str, Any] = {"q_lora_rank": None, "first_k_dense_replace": 1}
    given |= {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "topk_method": "greedy"}
    given |= {"rope_parameters": _stretched(0.707), "n_group": 1, "topk_group": 1}
    published = MIXTURE | {"moe_layer_freq": 1, "scoring_func": "softmax"}
    return _written(path, DeepseekV2Config, DeepseekV2ForCausalLM, given, published, options)


def tiny_deepseek_v3(path: Path, **options: Any) -> Path:
    """Writes a random DeepSeek-V3 checkpoint: queries of a low rank, groups of experts, YaRN."""
    given: dict[str, Any] = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    given |= {"num_experts_per_tok": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    given |= {"rope_parameters": _stretched(1.0), "num_mtp_layers": 0}
    return _written(path, DeepseekV3Config, DeepseekV3ForCausalLM, given, _CHOICE, options)


def tiny_moonlight(path: Path, **options: Any) -> Path:
    """Writes a random Moonlight checkpoint: DeepSeek-V3 with queries at full rank, one group."""
    given: dict[str, Any] = {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
    given |= {"n_shared_experts": 2, "num_experts_per_tok": 2, "routed_scaling_factor": 2.446}
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
    return tiny_deepseek_v3(path, **given | plain | options)


def tiny_glm4_moe_lite(path: Path, **options: Any) -> Path:
    """Writes a random GLM-4.7-Flash checkpoint; config.json counts the dense layers."""
    given: dict[str, Any] = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8}
    given |= {"norm_topk_prob": True}
    published = {"topk_method": "noaux_tc", "first_k_dense_replace": 1}
    published |= {"num_nextn_predict_layers": 0}
    kinds = Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM
    return _written(path, *kinds, given, published, options, ("mlp_layer_types",))


_CHOICE = MIXTURE | {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def _stretched(mscale: float) -> dict[str, Any]:
    return {**YARN, "rope_type": "yarn", "rope_theta": 10000.0} | dict.fromkeys(
        ("mscale", "mscale_all_dim"), mscale
    )


def _written(
    path: Path,
    config: Any,
    model: Any,
    given: dict[str, Any],
    published: dict[str, Any],
    options: dict[str, Any],
    unpublished: tuple[str, ...] = (),
) -> Path:
    """Writes a checkpoint whose config.json has the keys of published ones.

    options: seed, head_std, and fields of `config`.
    """
    seed, head_std = options.pop("seed", 0), options.pop("head_std", 2.0)
    shared = {k: v for k, v in _shared_config().items() if k != "head_dim"}
    made = model(config(**shared | LATENT | EXPERTS | given | options)).float()
    _randomise(made, seed, head_std)
    _bias_choices(made, seed)
    _save(made, path, made.config.vocab_size)
    file = path / "config.json"
    tree = json.loads(file.read_text()) | published
    rope = tree.pop("rope_parameters")
    tree["rope_theta"] = rope.pop("rope_theta")
    stretched = rope.pop("rope_type") != "default"
    tree["rope_scaling"] = rope if stretched else None
    for name in ("head_dim", "qk_head_dim", *unpublished):
        tree.pop(name, None)
    file.write_text(json.dumps(tree))
    return path
