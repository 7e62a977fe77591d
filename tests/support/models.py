"""Tiny random Hugging Face checkpoints, so that a test can run the real engines in seconds.

Weights are scaled up from transformers' initialisation: a freshly initialised model is almost
uniform over the vocabulary, and a test on an almost uniform distribution cannot tell a wrong row or
temperature from a right one.
"""

import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB_SIZE = 512
EOS_TOKEN_ID = 1
PAD_TOKEN_ID = 0


def write_tokenizer(path: Path, vocab_size: int = VOCAB_SIZE, special: str | None = None) -> None:
    """Byte-level tokenizer: ids 0, 1 are <pad>, <eos>, 2..257 are bytes, the rest are unused.

    special: text of a special token besides, which is the last id.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<eos>", *alphabet]
    words += [f"<unused{i}>" for i in range(vocab_size - len(words))]
    words[-1] = special or words[-1]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.add_special_tokens([special] if special else [])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(path)


def _shared_config(**overrides: object) -> dict[str, object]:
    config: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
        "torch_dtype": "float32",
    }
    return config | overrides


def _randomise(model: PreTrainedModel, seed: int, head_std: float) -> None:
    """Matrices ~ N(0, 1/fan_in), norms ~ 1 + N(0, 0.01), biases ~ N(0, 1); own generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".bias"):
                parameter.copy_(noise)
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * noise)
            elif "embed" in name and not model.config.tie_word_embeddings:
                parameter.copy_(noise)
            elif "lm_head" in name or "embed" in name:
                parameter.copy_(noise * head_std / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def _save(model: torch.nn.Module, path: Path, vocab_size: int) -> Path:
    model.save_pretrained(path, safe_serialization=True)
    write_tokenizer(path, vocab_size)
    return path


def tiny_qwen3(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random dense Qwen3 checkpoint (float32, 0.2 M parameters) to `path` and returns it.

    head_std: standard deviation of the logits; 2 gives about 4.5 nats of entropy at 512 ids.
    overrides: fields of Qwen3Config.
    """
    config = Qwen3Config(**_shared_config(**overrides))
    model = Qwen3ForCausalLM(config).float()
    _randomise(model, seed, head_std)
    return _save(model, path, config.vocab_size)


def tiny_qwen3_moe(
    path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object
) -> Path:
    """Writes a random Qwen3-MoE checkpoint (float32, 4 experts, top-2) to `path` and returns it."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
    }
    config = Qwen3MoeConfig(**(_shared_config() | experts | overrides))
    model = Qwen3MoeForCausalLM(config).float()
    _randomise(model, seed, head_std)
    return _save(model, path, config.vocab_size)


def tiny_qwen2_moe(
    path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object
) -> Path:
    """Writes a random Qwen2-MoE checkpoint (float32, 4 experts, top-2, a shared one) to `path`."""
    experts: dict[str, object] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
    }
    config = Qwen2MoeConfig(**_without_attention_bias(experts | overrides))
    model = Qwen2MoeForCausalLM(config).float()
    _randomise(model, seed, head_std)
    return _save(model, path, config.vocab_size)


GEMMA3_ROPE = {
    "rope_theta": 1e6,
    "rope_local_base_freq": 5000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


def tiny_gemma3(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random Gemma 3 text checkpoint (float32) to `path` and returns it.

    Heads are larger than hidden_size / num_attention_heads; every second of its four layers has a
    window of 32 positions; config.json has the keys of published ones.
    """
    sizes: dict[str, object] = {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    rope = {
        "full_attention": GEMMA3_ROPE["rope_scaling"] | {"rope_theta": 1e6},  # type: ignore[operator]
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    config = Gemma3TextConfig(**_shared_config(rope_parameters=rope) | sizes | overrides)
    model = Gemma3ForCausalLM(config).float()
    _randomise(model, seed, head_std)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms multiply by 1 + weight
                parameter.sub_(1)
    _save(model, path, config.vocab_size)
    file = path / "config.json"
    written = json.loads(file.read_text())
    del written["rope_parameters"]
    file.write_text(json.dumps(written | GEMMA3_ROPE))
    return path


def tiny_glm4_moe(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random GLM-4.5 checkpoint (float32, a dense layer, then 4 experts, top-2)."""
    experts: dict[str, object] = {
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    }
    config = Glm4MoeConfig(**(_shared_config(rms_norm_eps=1e-5) | experts | overrides))
    model = Glm4MoeForCausalLM(config).float()
    _randomise(model, seed, head_std)
    _bias_choices(model, seed)
    return _save(model, path, config.vocab_size)


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def tiny_gpt_oss(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random gpt-oss checkpoint (float32, 4 experts, top-2) to `path` and returns it.

    Every second of its four layers has a window of 32 positions; gates and ups reach their limit;
    config.json has the keys of published ones.
    """
    sizes: dict[str, object] = {
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "attention_bias": True,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.5,
        "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.0,
        "rope_parameters": GPT_OSS_ROPE | {"rope_theta": 150000.0},
    }
    config = GptOssConfig(**_shared_config() | sizes | overrides)
    model = GptOssForCausalLM(config).float()
    _randomise(model, seed, head_std)
    _save(model, path, config.vocab_size)
    file = path / "config.json"
    written = json.loads(file.read_text())
    rope = dict(written.pop("rope_parameters"))
    of_files = {"experts_per_token": config.num_experts_per_tok, "initial_context_length": 64}
    written |= of_files | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    file.write_text(json.dumps(written))
    return path


def tiny_minimax_m2(
    path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object
) -> Path:
    """Writes a random MiniMax-M2 checkpoint (float32, 4 experts, top-2) to `path` and returns it.

    Half of a head turns; config.json has the keys of published ones.
    """
    sizes: dict[str, object] = {
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
    }
    config = MiniMaxM2Config(**_without_attention_bias(sizes | overrides))
    model = MiniMaxM2ForCausalLM(config).float()
    _randomise(model, seed, head_std)
    _bias_choices(model, seed)
    _save(model, path, config.vocab_size)
    file = path / "config.json"
    written = json.loads(file.read_text())
    theta = written.pop("rope_parameters")["rope_theta"]
    file.write_text(json.dumps(written | {"rope_theta": theta, "num_mtp_modules": 3}))
    return path


def _bias_choices(model: PreTrainedModel, seed: int) -> None:
    """Correction biases ~ N(0, 0.3): about as far apart as sigmoids are, so that they count."""
    generator = torch.Generator().manual_seed(seed + 1)
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def tiny_qwen2(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random Qwen2 checkpoint (float32, biased queries, keys, values); returns `path`."""
    config = Qwen2Config(**_without_attention_bias(overrides))
    model = Qwen2ForCausalLM(config).float()
    _randomise(model, seed, head_std)
    return _save(model, path, config.vocab_size)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_llama(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random Llama 3 checkpoint (float32) to `path` and returns it.

    Its rotary stretching begins within the first hundred positions, so that a short test sees it.
    """
    config = LlamaConfig(**_shared_config(rope_parameters=LLAMA3_ROPE) | overrides)
    model = LlamaForCausalLM(config).float()
    _randomise(model, seed, head_std)
    return _save(model, path, config.vocab_size)


YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_FACTOR = 0.1 * math.log(4) + 1
"""By which YaRN multiplies cosines and sines there."""


def tiny_mistral(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random Mistral checkpoint (float32) to `path` and returns it."""
    config = MistralConfig(**_without_attention_bias({"sliding_window": None} | overrides))
    model = MistralForCausalLM(config).float()
    _randomise(model, seed, head_std)
    return _save(model, path, config.vocab_size)


def tiny_phi3(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random Phi-4 checkpoint (float32, fused projections, half of a head turns)."""
    fields = _shared_config(partial_rotary_factor=0.5) | overrides
    fields.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    config = Phi3Config(**fields)
    model = Phi3ForCausalLM(config).float()
    _randomise(model, seed, head_std)
    return _save(model, path, config.vocab_size)


def tiny_olmo2(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random OLMo 2 checkpoint (float32) to `path` and returns it."""
    config = Olmo2Config(**_shared_config(**overrides))
    model = Olmo2ForCausalLM(config).float()
    _randomise(model, seed, head_std)
    return _save(model, path, config.vocab_size)


def tiny_olmo3(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random OLMo 3 checkpoint (float32) to `path` and returns it.

    Three of its four layers have a window of 32 positions, the fourth YaRN; config.json says so as
    published ones do.
    """
    yarn = {key: value for key, value in YARN_ROPE.items() if key != "rope_theta"}
    sizes: dict[str, object] = {"num_hidden_layers": 4, "sliding_window": 32}
    config = Olmo3Config(
        **_shared_config(rope_parameters=None, rope_scaling=yarn) | sizes | overrides
    )
    model = Olmo3ForCausalLM(config).float()
    _randomise(model, seed, head_std)
    _save(model, path, config.vocab_size)
    file = path / "config.json"
    written = json.loads(file.read_text())
    del written["rope_parameters"]
    file.write_text(json.dumps(written | {"rope_theta": 500000.0, "rope_scaling": yarn}))
    return path


def tiny_smollm3(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random SmolLM3 checkpoint (float32, no rotary positions in its fourth layer)."""
    config = SmolLM3Config(**_shared_config(num_hidden_layers=4) | overrides)
    model = SmolLM3ForCausalLM(config).float()
    _randomise(model, seed, head_std)
    return _save(model, path, config.vocab_size)


def tiny_mixtral(path: Path, *, seed: int = 0, head_std: float = 2.0, **overrides: object) -> Path:
    """Writes a random Mixtral checkpoint (float32, 4 experts, top-2) to `path` and returns it."""
    experts: dict[str, object] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = MixtralConfig(**_without_attention_bias(experts | overrides))
    model = MixtralForCausalLM(config).float()
    _randomise(model, seed, head_std)
    return _save(model, path, config.vocab_size)


def _without_attention_bias(overrides: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in _shared_config(**overrides).items() if k != "attention_bias"}


def dense_and_moe(base: Path) -> dict[str, Path]:
    """One model of each kind, in directories of `base`."""
    return {
        "dense": tiny_qwen3(base / "dense", seed=3),
        "moe": tiny_qwen3_moe(base / "moe", seed=4),
    }
