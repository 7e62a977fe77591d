"""config.json of families with latent attention, as transformers' own classes read it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.models.families.table import FAMILIES
from megatron_opd.models.latent import Latent
from megatron_opd.models.spec import ModelSpec
from tests.support.hf_configs import read, silenced

LATENT = sorted(name for name, family in FAMILIES.items() if family.latent)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
SIZES |= {"vocab_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
SIZES |= {"num_experts_per_tok": 4, "n_routed_experts": 16}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
ASKED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"scoring_func": "softmax", "n_group": 1, "topk_group": 1, "moe_layer_freq": 1},
    "deepseek_v3": SIGMOID | {"n_group": 4, "topk_group": 2},
    "glm4_moe_lite": SIGMOID | {"first_k_dense_replace": 1},
}
"""What SGLang asks for, and published files have."""
YARN: dict[str, Any] = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
YARN |= {"mscale": 0.7, "mscale_all_dim": 0.7}
VALUES: dict[str, tuple[Any, ...]] = {
    "q_lora_rank": (24, None, 0),
    "kv_lora_rank": (32, None),
    "qk_nope_head_dim": (16, None),
    "qk_rope_head_dim": (8, 7, None),
    "v_head_dim": (12, None),
    "head_dim": (8, 64, 16, None),
    "num_key_value_heads": (8, 4, None),
    "rope_interleave": (True, False, None),
    "rope_theta": (50000.0, 10000, None),
    "rope_scaling": (
        YARN,
        YARN | {"mscale": 1.0},
        YARN | {"mscale": None},
        YARN | {"attn_factor": 0.9},
        YARN | {"truncate": False},
        {"type": "linear", "factor": 2.0},
        None,
    ),
    "first_k_dense_replace": (0, 1, 4, None),
    "mlp_layer_types": (["dense"] + ["sparse"] * 3, ["sparse"] * 4, None),
    "n_routed_experts": (16, 6, None),
    "num_experts": (8, None),
    "num_local_experts": (8, None),
    "num_experts_per_tok": (4, 2, 1, None),
    "n_shared_experts": (1, 2, 0, None),
    "moe_intermediate_size": (32, None),
    "n_group": (1, 4, None),
    "topk_group": (1, 2, None),
    "routed_scaling_factor": (1.0, 2.5, None),
    "norm_topk_prob": (True, False, None),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc", None),
    "scoring_func": ("softmax", "sigmoid", None),
    "moe_layer_freq": (1, 2, None),
    "rms_norm_eps": (1e-6, 1e-5, None),
    "attention_bias": (True, False, None),
    "mlp_bias": (True, False, None),
    "tie_word_embeddings": (True, False, None),
    "num_nextn_predict_layers": (0, 1, None),
}


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=6))
    config = {key: draw(st.sampled_from(VALUES[key])) for key in keys}
    family = draw(st.sampled_from(LATENT))
    return {"model_type": family, **SIZES, **ASKED[family], **config}


def same(spec: ModelSpec, config: Any) -> None:
    """Every field that a learner is built from is transformers'."""
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    assert spec.latent == Latent(config.q_lora_rank, *(getattr(config, key) for key in sizes))
    assert (spec.head_dim, spec.num_kv_heads) == (config.qk_head_dim, config.num_key_value_heads)
    assert config.num_key_value_heads == config.num_attention_heads
    assert getattr(config, "rope_interleave", True) is True
    rope = config.rope_parameters
    assert (spec.rope.type, spec.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    if spec.rope.type == "yarn":
        assert spec.rope.factor == rope["factor"]
        assert spec.rope.original_max_position == rope["original_max_position_embeddings"]
        assert spec.rope.mscale_all_dim == rope["mscale_all_dim"] == rope["mscale"]
    assert (spec.norm_eps, spec.tied) == (config.rms_norm_eps, config.tie_word_embeddings)
    assert not config.attention_bias
    assert not getattr(config, "mlp_bias", False)
    assert spec.num_experts == config.n_routed_experts
    assert spec.experts_per_token == config.num_experts_per_tok
    assert spec.expert_ffn_size == config.moe_intermediate_size
    assert spec.shared_ffn_size == config.n_shared_experts * config.moe_intermediate_size
    assert spec.routed_scale == config.routed_scaling_factor
    if config.model_type == "glm4_moe_lite":
        assert list(spec.moe_layers) == [kind == "sparse" for kind in config.mlp_layer_types]
    else:
        first = config.first_k_dense_replace
        assert list(spec.moe_layers) == [layer >= first for layer in range(4)]
    if config.model_type == "deepseek_v2":
        assert (spec.norm_topk_prob, config.topk_method, spec.expert_groups) == (
            False,
            "greedy",
            None,
        )
        return
    assert spec.norm_topk_prob == config.norm_topk_prob
    groups = None if config.n_group == 1 else (config.n_group, config.topk_group)
    assert spec.expert_groups == groups


@pytest.fixture(autouse=True)
def quiet():
    with silenced():
        yield


@settings(max_examples=300, deadline=None)
@given(configs())
def test_what_is_accepted_is_read_as_transformers_reads_it(config: dict[str, Any]):
    ours, theirs = read(config)
    if isinstance(ours, ModelSpec):
        assert theirs is not None, "accepted, but transformers refuses it"
        same(ours, theirs)


@pytest.mark.parametrize("family", LATENT)
def test_published_files_without_what_has_a_default_are_accepted(family: str):
    given = {"model_type": family, **SIZES, **ASKED[family]}
    ours, theirs = read(given)
    assert isinstance(ours, ModelSpec), ours
    same(ours, theirs)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "ranks no groups of experts by"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob must be False, as in V2-Lite"),
        ("deepseek_v2", {"routed_scaling_factor": 16.0}, "routed_scaling_factor must be 1, as in"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', as SGLang"),
        ("deepseek_v3", {"topk_group": 4}, "topk_group must be half of num_experts_per_tok"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave must be True, got False"),
        ("deepseek_v3", {"head_dim": 64}, "head_dim must be left out, or be qk_rope_head_dim"),
        ("glm4_moe_lite", {"head_dim": None}, "head_dim must be left out, or be qk_rope_head_dim"),
        ("deepseek_v3", {"num_key_value_heads": 4}, "num_key_value_heads must be num_attention"),
        (
            "deepseek_v3",
            {"rope_scaling": YARN | {"mscale": 1.0}},
            "mscale and mscale_all_dim must be equal numbers",
        ),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "one of default, ya"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace must be 1, as SG"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 4}, "must name one dense layer, and"),
        ("kimi_k2", {}, "set model_type to deepseek_v3 and remove auto_map"),
    ],
)
def test_what_learner_and_server_would_read_differently_is_refused(
    family: str, change: dict[str, Any], message: str
):
    extra = {"qk_rope_head_dim": 8} if "head_dim" in change else {}
    ours, _ = read({"model_type": family, **SIZES, **ASKED.get(family, {}), **extra, **change})
    assert isinstance(ours, str)
    assert message in ours
