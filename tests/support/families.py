"""Tiny random checkpoints of many families, with a config.json as published ones write it.

A window is 32 tokens and an original context 64, so that sequences of some hundred tokens are
beyond both. transformers writes rope_parameters; published files have rope_theta and rope_scaling.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.delta_models import published_dense_qwen3_5, published_qwen3_5_moe
from tests.support.latent_models import (
    tiny_deepseek_v2,
    tiny_deepseek_v3,
    tiny_glm4_moe_lite,
    tiny_moonlight,
)
from tests.support.models import VOCAB_SIZE, tiny_qwen2_moe, write_tokenizer

Fields = Mapping[str, Any]

WINDOW, ORIGINAL = 32, 64
THETA = 50000.0
"""No class's default, as rms_norm_eps is none: who does not read either is found."""
BASE: Fields = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    "rms_norm_eps": 1e-4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
YARN: Fields = {
    "rope_type": "yarn",
    "rope_theta": THETA,
    "factor": 32.0,
    "original_max_position_embeddings": ORIGINAL,
}
ROUTED: Fields = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class TinyFamily:
    """A checkpoint to be made.

    config, model: transformers' classes. fields: of the configuration, over BASE. without: fields
    of BASE that the class has not, or computes. written: what config.json says besides; None
    removes a key. kept_rope: config.json has rope_parameters, as transformers 5 writes it.
    """

    config: str
    model: str
    fields: Fields = field(default_factory=dict[str, Any])
    without: tuple[str, ...] = ()
    written: Fields = field(default_factory=dict[str, Any])
    kept_rope: bool = False

    def with_fields(self, **fields: Any) -> "TinyFamily":
        """The same family with other fields."""
        return TinyFamily(
            self.config,
            self.model,
            {**self.fields, **fields},
            self.without,
            self.written,
            self.kept_rope,
        )

    def saying(self, **written: Any) -> "TinyFamily":
        """The same weights under another config.json."""
        written = {**self.written, **written}
        return TinyFamily(
            self.config, self.model, self.fields, self.without, written, self.kept_rope
        )


def rope(**settings: Any) -> Fields:
    """Fields of rotary settings."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": THETA, **settings}}


NO_HEAD_DIM = ("head_dim",)
QWEN2 = TinyFamily("Qwen2Config", "Qwen2ForCausalLM", without=NO_HEAD_DIM)
QWEN3 = TinyFamily("Qwen3Config", "Qwen3ForCausalLM")
QWEN3_MOE = TinyFamily(
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM",
    {**ROUTED, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": []},
)
LLAMA = TinyFamily("LlamaConfig", "LlamaForCausalLM")
MISTRAL = TinyFamily("MistralConfig", "MistralForCausalLM", {"sliding_window": None})
MIXTRAL = TinyFamily(
    "MixtralConfig",
    "MixtralForCausalLM",
    {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
)
PHI3 = TinyFamily("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None}, NO_HEAD_DIM)
PHI4_MINI = PHI3.with_fields(**rope(partial_rotary_factor=0.75), tie_word_embeddings=True)
GRANITE = TinyFamily(
    "GraniteConfig",
    "GraniteForCausalLM",
    {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.8,
        "logits_scaling": 0.5,
    },
    NO_HEAD_DIM,
)
GRANITE_MOE = TinyFamily(
    "GraniteMoeConfig",
    "GraniteMoeForCausalLM",
    {**GRANITE.fields, "num_local_experts": 8, "num_experts_per_tok": 2},
    NO_HEAD_DIM,
)
LLAMA3_ROPE = rope(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL,
)
HALF_ROTARY = rope(partial_rotary_factor=0.5)
LONGROPE = rope(
    rope_type="longrope",
    partial_rotary_factor=0.75,
    original_max_position_embeddings=ORIGINAL,
    short_factor=[1.0] * 6,
    long_factor=[1.0, 1.1, 1.3, 1.8, 2.5, 4.0],
)

GEMMA3 = TinyFamily(
    "Gemma3TextConfig",
    "Gemma3ForCausalLM",
    {
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    },
    written={
        "rope_theta": 1e6,
        "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
)
OLMO2 = TinyFamily("Olmo2Config", "Olmo2ForCausalLM", without=NO_HEAD_DIM)
OLMO3 = TinyFamily(
    "Olmo3Config",
    "Olmo3ForCausalLM",
    {"num_hidden_layers": 4, "sliding_window": WINDOW, "rope_parameters": None},
    NO_HEAD_DIM,
    {"rope_theta": 500000, "rope_scaling": None},
)
OLMOE = TinyFamily(
    "OlmoeConfig",
    "OlmoeForCausalLM",
    {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
    },
    NO_HEAD_DIM,
)
SMOLLM3 = TinyFamily(
    "SmolLM3Config",
    "SmolLM3ForCausalLM",
    {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    NO_HEAD_DIM,
)
MINISTRAL3 = TinyFamily(
    "Ministral3Config",
    "Ministral3ForCausalLM",
    rope(**YARN, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0),
    written={"original_max_position_embeddings": ORIGINAL},
    kept_rope=True,
)
GLM4 = TinyFamily("Glm4Config", "Glm4ForCausalLM", {**HALF_ROTARY, "attention_bias": True})
GLM4_MOE = TinyFamily(
    "Glm4MoeConfig",
    "Glm4MoeForCausalLM",
    {
        **HALF_ROTARY,
        **ROUTED,
        "num_hidden_layers": 3,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
)
PLAIN_YARN = {key: value for key, value in YARN.items() if key != "rope_theta"}
ALL_ROPES = {
    "linear": rope(rope_type="linear", factor=4.0),
    "llama3": LLAMA3_ROPE,
    "yarn": rope(**YARN),
}


MIXED: Fields = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    **rope(partial_rotary_factor=0.25),
}
EVERY_FOURTH: Fields = {"full_attention_interval": 4, "attn_output_gate": True}
QWEN3_NEXT = TinyFamily(
    "Qwen3NextConfig",
    "Qwen3NextForCausalLM",
    {
        **MIXED,
        **ROUTED,
        "num_experts": 8,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    written=EVERY_FOURTH,
)
MROPE = rope(partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)
QWEN3_5 = TinyFamily(
    "Qwen3_5TextConfig",
    "Qwen3_5ForCausalLM",
    {**MIXED, **MROPE},
    written=EVERY_FOURTH,
    kept_rope=True,
)
QWEN3_5_MOE = TinyFamily(
    "Qwen3_5MoeTextConfig",
    "Qwen3_5MoeForCausalLM",
    {**MIXED, **MROPE, **ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 64},
    ("intermediate_size",),
    EVERY_FOURTH,
    kept_rope=True,
)

GPT_OSS_ROPE = rope(**YARN, beta_fast=32.0, beta_slow=1.0, truncate=False)
GPT_OSS = TinyFamily(
    "GptOssConfig",
    "GptOssForCausalLM",
    {
        **GPT_OSS_ROPE,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "swiglu_limit": 1.5,
    },
    written={"experts_per_token": 2, "initial_context_length": ORIGINAL},
)

MINIMAX_M2 = TinyFamily(
    "MiniMaxM2Config",
    "MiniMaxM2ForCausalLM",
    {
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
    },
    written={"num_mtp_modules": 3, "partial_rotary_factor": None},
)


def with_ropes(name: str, family: TinyFamily, *kinds: str) -> dict[str, TinyFamily]:
    """A family by its name, and once more for each further type of rotary positions."""
    varied = {f"{name}, {kind}": family.with_fields(**ALL_ROPES[kind]) for kind in kinds}
    return {name: family, **varied}


Maker = Callable[..., Path]
"""Writes a checkpoint to a path, with seed and head_std."""
SERVED: Mapping[str, TinyFamily | Maker] = {
    **with_ropes("Llama", LLAMA, *ALL_ROPES),
    "Llama, attention_bias": LLAMA.with_fields(attention_bias=True),
    **with_ropes("Qwen2", QWEN2, *ALL_ROPES),
    "Qwen2, window switched off": QWEN2.saying(use_sliding_window=False, sliding_window=WINDOW),
    **with_ropes("Qwen3", QWEN3, *ALL_ROPES),
    "Qwen3, yarn in rope_parameters": TinyFamily(
        "Qwen3Config", "Qwen3ForCausalLM", rope(**YARN), kept_rope=True
    ),
    "Qwen3, tied": QWEN3.with_fields(tie_word_embeddings=True),
    "Qwen3, attention_bias": QWEN3.with_fields(attention_bias=True),
    "Qwen3, head_dim 40": QWEN3.with_fields(head_dim=40),
    **with_ropes("Qwen3-MoE", QWEN3_MOE, *ALL_ROPES),
    "Qwen3-MoE, norm_topk_prob false": QWEN3_MOE.with_fields(norm_topk_prob=False),
    "Mixtral": MIXTRAL,
    **with_ropes("Mistral", MISTRAL, "yarn"),
    "Ministral 3": MINISTRAL3,
    "OLMo 2": OLMO2,
    "OLMo 3": OLMO3,
    "OLMo 3, yarn": OLMO3.saying(rope_scaling=PLAIN_YARN),
    "OLMoE": OLMOE,
    "Phi-3, Phi-4": PHI3,
    "Phi-4-mini": PHI4_MINI,
    "Seed-OSS": TinyFamily("SeedOssConfig", "SeedOssForCausalLM", {"attention_bias": True}),
    **with_ropes("SmolLM3", SMOLLM3, "yarn"),
    "ERNIE 4.5 dense": TinyFamily("Ernie4_5Config", "Ernie4_5ForCausalLM"),
    "Granite 3": GRANITE,
    "Granite 3, tied": GRANITE.with_fields(tie_word_embeddings=True),
    "Granite 3 MoE": GRANITE_MOE,
    "Granite 3 MoE, tied": GRANITE_MOE.with_fields(tie_word_embeddings=True),
    "GLM-4": GLM4,
    "GLM-4, no biases": GLM4.with_fields(attention_bias=False),
    "GLM-4.5, GLM-4.6": GLM4_MOE,
    "GLM-4.5, no query-key norm": GLM4_MOE.with_fields(use_qk_norm=False),
    "Qwen3-Next": QWEN3_NEXT,
    "Qwen3.5": QWEN3_5,
    "Qwen3.5, tied": QWEN3_5.with_fields(tie_word_embeddings=True),
    "Qwen3.5-MoE": QWEN3_5_MOE,
    "Gemma 3 text": GEMMA3,
    "Gemma 3 text, default": GEMMA3.saying(rope_scaling=None),
    "gpt-oss": GPT_OSS,
    "MiniMax-M2": MINIMAX_M2,
    "gpt-oss, truncated yarn": GPT_OSS.with_fields(**rope(**YARN)),
    "Qwen2-MoE": tiny_qwen2_moe,
    "DeepSeek-V2-Lite": tiny_deepseek_v2,
    "DeepSeek-V3, R1, Kimi-K2": tiny_deepseek_v3,
    "Moonlight": tiny_moonlight,
    # transformers normalises latents with 1e-6, whatever rms_norm_eps is
    "GLM-4.7-Flash": partial(tiny_glm4_moe_lite, rms_norm_eps=1e-6),
    "Qwen3.5, with a vision tower": published_dense_qwen3_5,
    "Qwen3.5-MoE, with a vision tower": published_qwen3_5_moe,
}
"""What SGLang serves rightly, by what it is called."""

WINDOWED: Fields = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
LIMITED: Mapping[str, TinyFamily] = {
    "Qwen2, window": QWEN2.with_fields(**WINDOWED),
    "Qwen3, window": QWEN3.with_fields(**WINDOWED),
    "Qwen3-MoE, window": QWEN3_MOE.with_fields(**WINDOWED),
    "Mistral, window": MISTRAL.with_fields(sliding_window=WINDOW),
    "Mixtral, window": MIXTRAL.with_fields(sliding_window=WINDOW),
    "Phi-3, window": PHI3.with_fields(sliding_window=WINDOW),
    "SmolLM3, window": SMOLLM3.with_fields(
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 4,
    ),
    "Phi-4-mini, longrope": PHI4_MINI.with_fields(
        **LONGROPE, original_max_position_embeddings=ORIGINAL
    ),
}
"""What SGLang serves rightly up to so many tokens, and wrongly beyond without a word."""

MISSERVED: Mapping[str, tuple[TinyFamily, str]] = {
    "Llama, mlp_bias": (LLAMA.with_fields(mlp_bias=True), "mlp_bias must be"),
    "Llama, dynamic": (
        LLAMA.with_fields(**rope(rope_type="dynamic", factor=4.0)),
        "got 'dynamic'",
    ),
    "Qwen3-MoE, a dense layer": (
        QWEN3_MOE.with_fields(num_hidden_layers=3, mlp_only_layers=[0]),
        "mlp_only_layers must be",
    ),
    "Qwen3, yarn with attn_factor": (
        QWEN3.with_fields(**rope(**YARN, attn_factor=0.8782488562869419)),
        "attn_factor of rope type yarn must be 1",
    ),
    "Qwen3, yarn with attention_factor": (
        QWEN3.with_fields(**rope(**YARN, attention_factor=1.5)),
        "attention_factor of rope type yarn must be left out or 1.3465736",
    ),
    "Llama, partial_rotary_factor": (
        LLAMA.saying(partial_rotary_factor=0.5),
        "partial_rotary_factor must be",
    ),
    "Llama, rope_is_neox_style": (
        LLAMA.saying(rope_is_neox_style=False),
        "rope_is_neox_style must be",
    ),
    "Mixtral, linear": (MIXTRAL.with_fields(**ALL_ROPES["linear"]), "got 'linear'"),
    "Mixtral, yarn": (MIXTRAL.with_fields(**ALL_ROPES["yarn"]), "got 'yarn'"),
    "Ministral 3, original context inside alone": (
        MINISTRAL3.saying(original_max_position_embeddings=None),
        "original_max_position_embeddings must be 64 outside",
    ),
    "OLMo 2, gelu": (OLMO2.with_fields(hidden_act="gelu"), "hidden_act must be"),
    "OLMo 3, rope_theta": (OLMO3.saying(rope_theta=10000.0), "rope_theta must be"),
    "OLMoE, clip_qkv": (OLMOE.with_fields(clip_qkv=0.5), "clip_qkv must be"),
    "OLMoE, norm_topk_prob": (OLMOE.with_fields(norm_topk_prob=True), "norm_topk_prob must be"),
    "OLMoE, rms_norm_eps": (OLMOE.with_fields(rms_norm_eps=0.01), "rms_norm_eps must be"),
    "Granite 3, attention_bias": (
        GRANITE.with_fields(attention_bias=True),
        "attention_bias must be",
    ),
    "MiniMax-M2, partial_rotary_factor": (
        MINIMAX_M2.saying(partial_rotary_factor=1.0),
        "partial_rotary_factor must be left out",
    ),
    "gpt-oss, swiglu_alpha": (GPT_OSS.with_fields(swiglu_alpha=1.0), "swiglu_alpha must be"),
}
"""What SGLang serves wrongly, most of it without a word, and what refuses it."""


def make(family: TinyFamily | Maker, path: Path, seed: int = 3, head_std: float = 2.0) -> Path:
    """Write the checkpoint (float32, about 0.2 M parameters) to `path`, with a tokenizer."""
    if not isinstance(family, TinyFamily):
        return family(path, seed=seed, head_std=head_std)
    torch.manual_seed(seed)
    fields = {key: value for key, value in BASE.items() if key not in family.without}
    config = getattr(transformers, family.config)(**copy.deepcopy(fields | dict(family.fields)))
    config.dtype = torch.float32
    model = getattr(transformers, family.model)(config).float().eval()
    randomise(model, seed, head_std)
    model.save_pretrained(path)
    file = path / "config.json"
    said = json.loads(file.read_text())
    if not family.kept_rope:
        said |= published_rope(said.pop("rope_parameters", None) or {})
    for key, value in family.written.items():
        if value is None:
            said.pop(key, None)
        else:
            said[key] = value
    file.write_text(json.dumps(said, indent=1))
    write_tokenizer(path)
    return path


def published_rope(settings: Fields) -> dict[str, Any]:
    """The keys with which files of transformers 4 say it."""
    scaling = {
        k: v for k, v in settings.items() if k not in ("rope_theta", "partial_rotary_factor")
    }
    said: dict[str, Any] = {"rope_theta": settings.get("rope_theta")}
    if "partial_rotary_factor" in settings:
        said["partial_rotary_factor"] = settings["partial_rotary_factor"]
    said["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
    return said


def randomise(model: Any, seed: int, head_std: float) -> None:
    """Matrices ~ N(0, 1/fan_in), norms around their first value, biases ~ N(0, 0.09)."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(noise * (0.3 if "bias" in name else 0.1))
            elif "embed" in name and not tied:
                parameter.copy_(noise)
            elif "lm_head" in name or "embed" in name:
                parameter.copy_(noise * head_std / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
