"""config.json read as transformers' own configuration classes read it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.models.delta_net import DeltaNet
from megatron_opd.models.families.qwen import QWEN2_MOE, QWEN3_MOE
from megatron_opd.models.families.table import FAMILIES
from megatron_opd.models.spec import ModelSpec
from tests.support.hf_configs import read, silenced

# those of latent attention are in test_latent.py
PLAIN = sorted(name for name, family in FAMILIES.items() if not family.latent)

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"vocab_size": 512, "num_attention_heads": 8}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = (
    *({"rope_type": kind} for kind in ("default", "yarn", None)),
    {"rope_type": "yarn", "factor": 4.0},
    {"type": "yarn", "factor": 8, "rope_theta": 7e4, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "beta_slow": 2.5, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1, "beta_slow": None},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1},
    *({"type": kind, "factor": 4.0} for kind in ("default", "linear", "dynamic")),
    {"rope_type": "linear", "factor": 2, "rope_theta": 500.0},
    {"rope_type": "linear", "type": "default", "factor": 3.0},
    {"rope_type": "llama3", **LLAMA3},
    {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", **LLAMA3, "rope_theta": 7e4, "original_max_position_embeddings": 32},
    {"rope_theta": 1e6},
    {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 1.0},
    {"rope_theta": None, "rope_type": "default"},
    {"full_attention": {"rope_type": "default", "rope_theta": 9e4}},
    {"rope_type": "default", "mrope_section": [1, 1, 2]},
    {},
    None,
)
BASE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"rope_scaling": ROPES[5]},
    "minimax_m2": {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"},
    "olmo3": {"rope_theta": 500000.0, "num_hidden_layers": 4},
    "qwen3_5_text": {"num_key_value_heads": 4, "full_attention_interval": 2},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
}
"""What a family's config.json must hold."""
VALUES: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1, 4, 8, None),
    "head_dim": (8, 16, None),
    "rms_norm_eps": (1e-6, 1e-5, 1, None),
    "rope_theta": (10000.0, 500000, None),
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "tie_word_embeddings": (True, False, None),
    "hidden_act": ("silu", "gelu", None),
    "max_position_embeddings": (128, 4096, None),
    "original_max_position_embeddings": (64, 128, None),
    "partial_rotary_factor": (1.0, 0.5, None),
    "rotary_dim": (64, 8, 4, None),
    "attention_bias": (True, False, None),
    "mlp_bias": (True, False, None),
    "sliding_window": (32, None),
    "use_sliding_window": (True, False, None),
    "max_window_layers": (1, 28),
    "no_rope_layers": ([1, 0], [0, 0], [1], [2, 1], None),
    "no_rope_layer_interval": (1, 2, None),
    "sliding_window_pattern": (2, 6, None),
    "rope_local_base_freq": (500.0, 10000, None),
    "query_pre_attn_scalar": (16, 256, None),
    "hidden_activation": ("gelu_pytorch_tanh", "gelu", None),
    "attn_logit_softcapping": (None, 50.0),
    "use_bidirectional_attention": (False, True, None),
    "layer_types": (
        ["full_attention"] * 2,
        ["full_attention", "sliding_attention"],
        ["full_attention", "sliding_attention"] * 2,
        ["linear_attention", "full_attention"],
        None,
    ),
    "num_experts_per_tok": (1, 2, None),
    "num_experts": (16, 8, None),
    "num_local_experts": (4, 16, None),
    "moe_intermediate_size": (32, None),
    "shared_expert_intermediate_size": (48, 0, None),
    "n_shared_experts": (1, 2, 0, None),
    "n_routed_experts": (8, 16, None),
    "n_group": (1, 2, 3, None),
    "topk_group": (1, 2, None),
    "routed_scaling_factor": (1.0, 2.5, 1, None),
    "first_k_dense_replace": (1, 0, 2, None),
    "use_qk_norm": (True, False, None),
    "full_attention_interval": (2, 1, 4, 0, None),
    "linear_num_key_heads": (2, 3, None),
    "linear_num_value_heads": (16, 4, 2, None),
    "linear_key_head_dim": (8, None),
    "linear_value_head_dim": (16, None),
    "linear_conv_kernel_dim": (4, 2, None),
    "attn_output_gate": (True, False),
    "output_gate_type": ("swish", "sigmoid"),
    "mamba_ssm_dtype": ("float32", "bfloat16"),
    "norm_topk_prob": (True, False, None),
    "decoder_sparse_step": (1, 2, None),
    "mlp_only_layers": ([], [0], None),
    "initializer_range": (0.02, 0.1, None),
}


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=8))
    config = {key: draw(st.sampled_from(VALUES[key])) for key in keys}
    family = draw(st.sampled_from(PLAIN))
    return {"model_type": family, **SIZES, **BASE.get(family, {}), **config}


def same(spec: ModelSpec, config: Any) -> None:
    """Every field that a learner is built from is transformers'."""
    rope = config.rope_parameters
    if "full_attention" in rope:
        plain = spec.window_rope or spec.rope
        rope, windowed = rope["full_attention"], rope["sliding_attention"]
        assert (plain.type, plain.theta) == (windowed["rope_type"], windowed["rope_theta"])
    assert (spec.rope.type, spec.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    if spec.rope.type != "default":
        assert spec.rope.factor == rope["factor"]
    if spec.rope.type == "yarn":
        bounds = spec.rope.beta_fast, spec.rope.beta_slow, spec.rope.truncate
        read = [rope.get(key) or known for key, known in (("beta_fast", 32), ("beta_slow", 1))]
        assert bounds == (*read, rope.get("truncate", True))
        assert spec.rope.original_max_position == rope["original_max_position_embeddings"]
    if spec.rope.type == "llama3":
        bounds = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        ours = (spec.rope.low_freq_factor, spec.rope.high_freq_factor)
        assert (*ours, spec.rope.original_max_position) == tuple(rope[key] for key in bounds)
    assert rope.get("partial_rotary_factor", 1.0) == spec.rope.share
    # as transformers' own rotary embeddings and attentions read it
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert (spec.head_dim, spec.num_kv_heads) == (head_dim, config.num_key_value_heads)
    assert (spec.norm_eps, spec.tied) == (config.rms_norm_eps, config.tie_word_embeddings)
    assert spec.max_position == config.max_position_embeddings
    assert spec.initializer_range == config.initializer_range
    if spec.family.gelu:
        assert config.hidden_activation == "gelu_pytorch_tanh"
        assert spec.query_scalar == config.query_pre_attn_scalar
        softcaps = config.attn_logit_softcapping, config.final_logit_softcapping
        assert (*softcaps, config.use_bidirectional_attention or None) == (None,) * 3
    else:
        assert config.hidden_act == "silu"
    glm = spec.family.name == "glm4_moe"
    biased = spec.family.qkv_bias if glm else spec.family.o_bias
    assert getattr(config, "attention_bias", False) == biased
    assert not getattr(config, "mlp_bias", False)
    # Qwen2-MoE has 0 without one, and SmolLM3 keeps what is switched off
    off = spec.family.name == "smollm3" and not config.use_sliding_window
    window = None if off else getattr(config, "sliding_window", None) or None
    assert (spec.window or spec.window_limit) == window
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * spec.num_layers
    if spec.window_limit is None:
        assert spec.windowed == (() if window is None else tuple(k[:2] == "sl" for k in kinds))
    if spec.family.has_delta_net:
        sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        read = [getattr(config, f"linear_{name}") for name in (*sizes, "conv_kernel_dim")]
        assert spec.delta_net == DeltaNet(*read)
        assert spec.delta_layers == tuple(kind == "linear_attention" for kind in kinds)
    turned = config.no_rope_layers if spec.family.name == "smollm3" else []
    assert spec.unturned == tuple(not each for each in turned)
    if not spec.family.moe:
        return
    for key in spec.family.experts_keys:
        assert spec.num_experts == getattr(config, key)
    if glm:
        groups = None if config.n_group == 1 else (config.n_group, config.topk_group)
        assert (spec.expert_groups, spec.routed_scale) == (groups, config.routed_scaling_factor)
        assert spec.family.qk_norm == config.use_qk_norm
        assert spec.moe_layers == tuple(
            layer >= config.first_k_dense_replace for layer in range(spec.num_layers)
        )
    assert spec.experts_per_token == config.num_experts_per_tok
    assert spec.expert_ffn_size == getattr(config, spec.family.expert_ffn_key)
    qwen = spec.family in (QWEN2_MOE, QWEN3_MOE)  # Mixtral's model reads none of these
    assert spec.norm_topk_prob == (config.norm_topk_prob if qwen else True)
    assert spec.shared_ffn_size == shared_size(spec, config)
    dense, step = (config.mlp_only_layers, config.decoder_sparse_step) if qwen else ([], 1)
    if glm:
        return
    expected = tuple(i not in dense and (i + 1) % step == 0 for i in range(spec.num_layers))
    assert spec.moe_layers == expected


def shared_size(spec: ModelSpec, config: Any) -> int:
    """Features of the experts that every token visits, as transformers' models read them."""
    if spec.family.name == "glm4_moe":
        return config.n_shared_experts * config.moe_intermediate_size
    shared = spec.family.name in ("qwen2_moe", "qwen3_5_moe_text")
    return config.shared_expert_intermediate_size if shared else 0


@pytest.fixture(autouse=True)
def quiet():
    with silenced():
        yield


@settings(max_examples=400, deadline=None)
@given(configs())
def test_what_is_accepted_is_read_as_transformers_reads_it(config: dict[str, Any]):
    ours, theirs = read(config)
    if isinstance(ours, ModelSpec):
        assert theirs is not None, "accepted, but transformers refuses it"
        same(ours, theirs)


@pytest.mark.parametrize("family", PLAIN)
def test_key_value_heads_that_are_null_are_read_as_transformers_reads_them(family: str):
    """Before: those of Qwen3.5, which transformers refuses, were as many as heads."""
    config = {"model_type": family, **SIZES, **BASE.get(family, {}), "num_key_value_heads": None}
    ours, theirs = read(config)
    if isinstance(ours, ModelSpec):
        assert theirs is not None, "accepted, but transformers refuses it"
        same(ours, theirs)


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("key", [None, *sorted(VALUES)])
def test_every_default_and_every_plain_value_is_accepted(family: str, key: str | None):
    plain = {
        "model_type": family,
        **SIZES,
        **BASE.get(family, {}),
        "num_key_value_heads": 4,
        "num_experts": 8,
    }
    if key is None:
        del plain["num_experts"]
        if "num_key_value_heads" not in BASE.get(family, {}):
            del plain["num_key_value_heads"]
        plain["num_attention_heads"] = 32  # the default of the key-value heads
    elif key == "rope_scaling":
        kind = FAMILIES[family].rope_types[-1]
        plain[key] = {"rope_type": "linear" if kind != "default" else kind, "factor": 2.0}
    elif key not in ("original_max_position_embeddings", "num_local_experts"):
        plain[key] = VALUES[key][0] if key not in ("rope_parameters",) else {"rope_theta": 1e6}
    if family == "glm4_moe":
        plain |= {"head_dim": 16} if key is None else {}
    elif key == "n_shared_experts":
        plain[key] = 0
    if key == "num_experts_per_tok" and FAMILIES[family].sigmoid_router:
        plain[key] = 2
    for refused in ("attention_bias", "mlp_bias", "use_sliding_window", "tie_word_embeddings"):
        if key == refused:
            plain[key] = False
    if key == "sliding_window" and FAMILIES[family].window == "none":
        plain[key] = None
    if key == "shared_expert_intermediate_size" and family not in ("qwen2_moe", "qwen3_5_moe_text"):
        plain[key] = 0
    if family in ("phi3", "gpt_oss") and key == "rope_scaling":
        return  # the learner knows none of the types that transformers' class has, or one alone
    if (family, key) == ("gpt_oss", "attention_bias"):
        plain[key] = True
    if family == "gemma3_text":
        plain |= {key: True} if key == "tie_word_embeddings" else {}
        if key == "rope_parameters":
            plain[key] = {"full_attention": ROPES[0] | {"rope_theta": 1e5}}
    if family in BASE and key in ("rope_parameters", "rope_theta"):
        return  # one value alone is accepted, and it has been
    wrong = (("olmo2", "sliding_window"), ("olmo3", "layer_types"))
    wrong += (("qwen3_5_text", "layer_types"), ("qwen3_5_moe_text", "layer_types"))
    for other, refused in wrong:
        if (family, key) == (other, refused):
            del plain[refused]
    ours, theirs = read(plain)
    assert isinstance(ours, ModelSpec), ours
    same(ours, theirs)


def test_rope_scaling_beside_rope_parameters_is_the_one_that_counts():
    both = {"model_type": "qwen3", **SIZES, "num_key_value_heads": 4}
    both |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    both |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    ours, theirs = read(both)
    assert isinstance(ours, ModelSpec)
    assert (ours.rope.type, ours.rope.theta, ours.rope.factor) == ("linear", 10000.0, 4.0)
    same(ours, theirs)


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", "dynamic"])
def test_a_kind_of_rotary_scaling_is_refused_by_its_name(kind: str):
    """Not by a setting that only it has."""
    scaling = {"type": kind, "long_factor": [2.0], "mrope_section": [1, 1, 2]}
    sizes = SIZES | {"num_key_value_heads": 4}
    ours, _ = read({"model_type": "qwen3", **sizes, "rope_scaling": scaling})
    assert isinstance(ours, str)
    assert ours.endswith(f"rope type must be one of default, linear, llama3, yarn, got {kind!r}")
