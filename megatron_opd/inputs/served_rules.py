"""Lists the architectures that SGLang 0.5.23 serves as transformers computes them, and the limits.

A teacher needs no more than that: no learner knows its layers. Every row was measured on a CPU
(`python -m checks families`, docs/families.md). What SGLang would serve otherwise without a word is
refused here by name; a weight that it leaves unread is the server's to refuse
(sglang_bridge/server/loaded.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isclose, log
from typing import Any, Literal

from megatron_opd.config.teacher import Trust
from megatron_opd.config.wording import shown
from megatron_opd.models.hf_config import check_delta_nets

DELTA_NET = "linear_num_value_heads"
"""A key of models with gated delta nets, and of no others."""
Window = Literal["none", "ignored", "switched", "served"]


@dataclass(frozen=True, slots=True)
class ServedArchitecture:
    """Describes an architecture that was measured.

    model_type: config.json's, by which transformers goes. published: models of it. ropes: types of
    rotary positions. window: none, as transformers has none either; ignored by SGLang, switched:
    the same where use_sliding_window is true. fixed: further keys at which both sides agree at
    these values alone (None stands for null and for an absent key). partial: both rotate a part of
    a head. shared: both read how large the shared expert is.
    """

    model_type: str
    published: str
    ropes: tuple[str, ...] = ("default",)
    window: Window = "none"
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    partial: bool = False
    shared: bool = False


_ROPES = ("default", "linear", "llama3", "yarn")
_UNTIED = {"tie_word_embeddings": (None, False)}
MEASURED: dict[str, ServedArchitecture] = {
    "LlamaForCausalLM": ServedArchitecture(
        "llama", "Llama 3, SmolLM 2", _ROPES, fixed={"mlp_bias": (None, False)}
    ),
    "Qwen2ForCausalLM": ServedArchitecture("qwen2", "Qwen2, Qwen2.5", _ROPES, "switched"),
    "Qwen3ForCausalLM": ServedArchitecture("qwen3", "Qwen3", _ROPES, "switched"),
    "Qwen3MoeForCausalLM": ServedArchitecture(
        "qwen3_moe",
        "Qwen3-MoE",
        _ROPES,
        "switched",
        {**_UNTIED, "mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1)},
    ),
    "MixtralForCausalLM": ServedArchitecture("mixtral", "Mixtral", window="ignored", fixed=_UNTIED),
    "MistralForCausalLM": ServedArchitecture(
        "mistral", "Mistral, Mistral Nemo", ("default", "yarn"), "ignored"
    ),
    "Ministral3ForCausalLM": ServedArchitecture("ministral3", "Ministral 3", ("yarn",), "ignored"),
    "Olmo2ForCausalLM": ServedArchitecture("olmo2", "OLMo 2"),
    "Olmo3ForCausalLM": ServedArchitecture(
        "olmo3",
        "OLMo 3",
        ("default", "yarn"),
        "served",
        # where config.json has one, transformers gives it to the layers without a window alone
        {"rope_theta": (None, 500000)},
    ),
    "OlmoeForCausalLM": ServedArchitecture(
        "olmoe",
        "OLMoE",
        fixed={**_UNTIED, "norm_topk_prob": (None, False), "rms_norm_eps": (None, 1e-5)},
    ),
    "Phi3ForCausalLM": ServedArchitecture(
        "phi3", "Phi-3, Phi-4, Phi-4-mini", ("default", "longrope"), "ignored", partial=True
    ),
    "SeedOssForCausalLM": ServedArchitecture("seed_oss", "Seed-OSS"),
    "SmolLM3ForCausalLM": ServedArchitecture("smollm3", "SmolLM3", ("default", "yarn"), "switched"),
    "Ernie4_5ForCausalLM": ServedArchitecture("ernie4_5", "ERNIE 4.5 dense"),
    "GraniteForCausalLM": ServedArchitecture(
        "granite", "Granite 3", fixed={"attention_bias": (None, False)}
    ),
    "GraniteMoeForCausalLM": ServedArchitecture(
        "granitemoe", "Granite 3 MoE", fixed={"attention_bias": (None, False)}
    ),
    "Glm4ForCausalLM": ServedArchitecture("glm4", "GLM-4", partial=True),
    "Glm4MoeForCausalLM": ServedArchitecture(
        "glm4_moe",
        "GLM-4.5, GLM-4.6",
        fixed={
            **_UNTIED,
            "n_shared_experts": (1,),
            "scoring_func": (None, "sigmoid"),
            "topk_method": (None, "noaux_tc"),
        },
        partial=True,
    ),
    "Gemma3ForCausalLM": ServedArchitecture(
        "gemma3_text",
        "Gemma 3 text",
        ("default", "linear"),
        "served",
        {
            "tie_word_embeddings": (None, True),
            "hidden_act": (None, "silu", "gelu_pytorch_tanh"),  # neither side reads it
            "hidden_activation": ("gelu_pytorch_tanh",),
            "use_bidirectional_attention": (None, False),
        },
    ),
}

_GATED = {
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "swish"),
    "mamba_ssm_dtype": (None, "float32"),
    "attention_bias": (None, False),
    "norm_topk_prob": (None, True),
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
}
MEASURED |= {
    "Qwen3NextForCausalLM": ServedArchitecture(
        "qwen3_next", "Qwen3-Next", fixed={**_UNTIED, **_GATED}, partial=True, shared=True
    ),
    "Qwen3_5ForCausalLM": ServedArchitecture(
        "qwen3_5_text", "Qwen3.5, Qwen3.6 text", fixed=_GATED, partial=True
    ),
    "Qwen3_5MoeForCausalLM": ServedArchitecture(
        "qwen3_5_moe_text",
        "Qwen3.5-MoE, Qwen3.6-MoE text",
        fixed={**_UNTIED, **_GATED},
        partial=True,
        shared=True,
    ),
}
MEASURED |= {
    "MiniMaxM2ForCausalLM": ServedArchitecture(
        "minimax_m2", "MiniMax-M2", fixed=_UNTIED, partial=True
    ),
    "GptOssForCausalLM": ServedArchitecture(
        "gpt_oss",
        "gpt-oss",
        ("yarn",),  # which transformers takes for a config.json that names none
        "served",
        {
            **_UNTIED,
            "attention_bias": (None, True),
            "swiglu_alpha": (None, 1.702),
            "hidden_act_alpha": (None, 1.702),
        },
    ),
}

FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "is_causal": (None, True),
    "rope_is_neox_style": (None, True),
    "partial_rotary_factor": (None, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "dual_chunk_attention_config": (None,),
    "per_layer_config": (None,),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
}
"""Keys that one of SGLang and transformers acts on, and where both agree."""

_DSA = (
    "its sparse attention (DSA) runs on CUDA alone and was compared with nothing; served as "
    "DeepSeek-V3 it is another model beyond index_topk tokens"
)
_MAMBA = "its Mamba layers need CUDA kernels (mamba-ssm), so that it was compared with nothing"
_KIMI_K3 = "its linear attention runs on CUDA alone, so that it was compared with nothing"
_LLAMA4 = "SGLang's code for it computes in bfloat16 alone and has no experts on a CPU"
_HUNYUAN = "SGLang 0.5.23 cannot build it from the config.json that transformers reads"
UNSERVED: Mapping[str, str] = {
    "NemotronHForCausalLM": _MAMBA,
    "GraniteMoeHybridForCausalLM": _MAMBA,
    "DeepseekV32ForCausalLM": _DSA,
    "GlmMoeDsaForCausalLM": _DSA,
    "KimiK3ForConditionalGeneration": _KIMI_K3,
    "KimiK3LinearForCausalLM": _KIMI_K3,
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HunYuanMoEV1ForCausalLM": _HUNYUAN,
    "Exaone4ForCausalLM": "SGLang 0.5.23 fails on its pattern of windows",
    "Gemma2ForCausalLM": "SGLang's kernel for its logit caps runs on CUDA alone",
}
"""Why an architecture is refused whatever teacher.trust says."""


def named_architecture(raw: Mapping[str, Any]) -> str:
    """Return the architecture of a config.json, `none` where it names none."""
    named: Any = raw.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "none"


def check_architecture(raw: Mapping[str, Any], trust: Trust, remedy: str) -> None:
    """Raise ValueError for an architecture that no server here serves, or that nobody compared.

    remedy: against the latter.
    """
    name = named_architecture(raw)
    if name in UNSERVED:
        raise ValueError(f"architecture {name} is refused: {UNSERVED[name]}")
    if isinstance(raw.get("text_config"), dict):
        raise ValueError(
            f"architecture {shown(name, 80)} has parts besides its language model, which were "
            "compared with nothing: save that alone (transformers' class of text_config) and give "
            "the result"
        )
    if name not in MEASURED and trust == "measured":
        raise ValueError(
            f"architecture {shown(name, 80)} is not among those whose scores were compared with "
            f"transformers: {', '.join(MEASURED)}; {remedy}"
        )
    if name in MEASURED and raw.get("model_type") != MEASURED[name].model_type:
        raise ValueError(
            f"architectures must be [{name!r}] only with model_type {MEASURED[name].model_type!r}, "
            f"as SGLang goes by the one and transformers by the other, got "
            f"{shown(raw.get('model_type'))}"
        )


def check_keys(raw: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that SGLang 0.5.23 and transformers act on differently."""
    row, ropes = MEASURED.get(named_architecture(raw)), rope_settings(raw)
    partial = [rope["partial_rotary_factor"] for rope in ropes if "partial_rotary_factor" in rope]
    said = {"partial_rotary_factor": partial[0] if partial else None, **raw}
    for key, allowed in ({**FIXED, **row.fixed} if row is not None else {}).items():
        if row is not None and row.partial and key == "partial_rotary_factor":
            continue
        if row is not None and row.shared and key == "shared_expert_intermediate_size":
            continue
        if said.get(key) not in allowed:
            values = " or ".join(map(json.dumps, allowed))
            raise ValueError(
                f"{key} must be {values}, beyond which SGLang 0.5.23 and transformers compute "
                f"different models, got {shown(said.get(key))}"
            )
    if DELTA_NET in raw:
        check_delta_nets(raw)
    for rope in ropes:
        check_rope(raw, rope, _ROPES if row is None else row.ropes)


def check_rope(raw: Mapping[str, Any], rope: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    """Raise ValueError for rotary positions of which SGLang 0.5.23 computes others."""
    kind = rope_type(rope)
    if kind not in allowed:
        raise ValueError(
            f"rope type must be one of {', '.join(allowed)}, whose scores equal transformers', got "
            f"{shown(kind)}"
        )
    outside = raw.get("original_max_position_embeddings")
    original = rope.get("original_max_position_embeddings", outside)
    if raw.get("model_type") == "ministral3" and outside is None:
        outside = 16384  # SGLang's default, by which queries are scaled
    if kind in ("yarn", "longrope") and (type(original) is not int or original < 1):
        raise ValueError(
            f"original_max_position_embeddings of rope type {kind} must be an integer >= 1, got "
            f"{shown(original)}"
        )
    if outside not in (None, original):
        raise ValueError(
            f"original_max_position_embeddings must be {shown(original)} outside the rotary "
            f"settings too, as SGLang reads that one, got {shown(outside)}"
        )
    if kind == "yarn":
        _check_yarn(rope)


def rope_type(rope: Mapping[str, Any]) -> Any:
    """Return the type that rotary settings name."""
    return rope.get("rope_type", rope.get("type", "default"))


def _check_yarn(rope: Mapping[str, Any]) -> None:
    factor, scale = rope.get("factor"), rope.get("attention_factor")
    if not isinstance(factor, int | float) or not factor >= 1:
        raise ValueError(f"factor of rope type yarn must be a number >= 1, got {shown(factor)}")
    if rope.get("attn_factor", 1) != 1:
        raise ValueError(
            "attn_factor of rope type yarn must be 1, as SGLang scales by it and transformers does "
            f"not, got {shown(rope['attn_factor'])}; without it both compute what transformers does"
        )
    usual = 0.1 * log(factor) + 1
    given = isinstance(scale, int | float)
    if scale is not None and not (given and isclose(scale, usual, rel_tol=1e-6)):
        raise ValueError(
            f"attention_factor of rope type yarn must be left out or {usual:.8g}, as SGLang 0.5.23 "
            f"takes it for that, got {shown(scale)}"
        )


def rope_settings(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rotary settings, those of each kind of layer where they differ. ValueError.

    Of both keys, rope_scaling is taken whole.
    """
    for key in ("rope_scaling", "rope_parameters"):
        settings: Any = raw.get(key) or {}
        if not isinstance(settings, dict):
            raise ValueError(f"{key} must be a mapping, got {shown(settings)}")
        if settings:
            return [each for each in settings.values() if isinstance(each, dict)] or [settings]
    return [{}]


@dataclass(frozen=True, slots=True)
class ExactUpTo:
    """Says up to how many tokens SGLang 0.5.23 computes what transformers does, and why no more."""

    tokens: int
    why: str


def exact_up_to(raw: Mapping[str, Any]) -> ExactUpTo | None:
    """Return the limit of a config.json; None: there is none."""
    found: list[ExactUpTo] = []
    window = raw.get("sliding_window")
    if _ignores_window(raw) and type(window) is int and window > 0:
        found.append(ExactUpTo(window, f"ignores its sliding_window of {window}"))
    for rope in rope_settings(raw):
        if rope_type(rope) == "longrope":
            outside = raw.get("original_max_position_embeddings")
            original = rope.get("original_max_position_embeddings", outside)
            found.append(ExactUpTo(original, "takes longrope's factors by what else it batches"))
    return min(found, key=lambda each: each.tokens, default=None)


def _ignores_window(raw: Mapping[str, Any]) -> bool:
    """Return whether transformers has a window where SGLang, as far as is known, has none."""
    row = MEASURED.get(named_architecture(raw))
    if row is not None and row.window != "switched":
        return row.window == "ignored"
    off = "use_sliding_window" in raw and not raw["use_sliding_window"]
    layers: Any = raw.get("layer_types") or ()
    if row is not None:  # whose classes have no window without the switch
        off = not raw.get("use_sliding_window")
    return not off or "sliding_attention" in layers
