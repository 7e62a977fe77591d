"""Reading config.json; every mistake names file and rule."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.rope import Rope, yarn_note
from megatron_opd.models.spec import read_model_spec
from tests.support.models import tiny_gpt_oss


def damaged(model: Path, copy: Path, **config: object) -> Path:
    copy.mkdir()
    values = json.loads((model / "config.json").read_text()) | config
    kept = {key: value for key, value in values.items() if value != "absent"}
    (copy / "config.json").write_text(json.dumps(kept))
    return copy


def test_the_architecture_is_read(moe: Path, dense: Path):
    spec = read_model_spec(moe)
    assert (spec.num_experts, spec.experts_per_token, spec.expert_ffn_size) == (4, 2, 64)
    assert spec.moe_layers == (False, True)
    assert spec.is_moe
    assert spec.norm_topk_prob
    assert spec.rope == Rope(10000.0)
    assert not read_model_spec(dense).is_moe


GEMMA3 = {"model_type": "gemma3_text", "rope_parameters": None, "tie_word_embeddings": True}
GEMMA3 |= {"sliding_window": 64}
OLMO3 = {"model_type": "olmo3", "sliding_window": 64, "rope_theta": 500000}
OLMO3 |= {"rope_parameters": "absent"}
MINIMAX = {"model_type": "minimax_m2", "use_qk_norm": True, "use_routing_bias": True}
MINIMAX |= {"scoring_func": "sigmoid", "num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type must be one of .*llama, .*, qwen3, .*qwen3_moe, .*got 'gpt2'",
        ),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias must be False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"hidden_size": "absent"}, "lacks the key 'hidden_size'"),
        (
            {"rope_parameters": {"rope_type": "dynamic"}},
            "rope type must be one of default, linear, llama3, yarn, got 'dynamic'",
        ),
        ({"rope_parameters": YARN | {"factor": 0.5}}, "factor >= 1 with YaRN, got 10000 and 0.5"),
        ({"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_theta must be > 1 and"),
        (
            {"rope_parameters": YARN | {"attention_factor": 1.5}},
            "attention_factor must be 1.1386.*, because SGLang 0.5.23 ignores it, got 1.5",
        ),
        ({"rope_parameters": YARN | {"mscale": 0.0}}, "mscale must be a number > 0"),
        ({"rope_parameters": YARN | {"beta_fast": None}}, "beta_fast must be a number > 0"),
        ({"rope_parameters": YARN | {"extrapolation_factor": 2.0}}, "rotary settings must be of"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"mlp_bias": True}, "mlp_bias must be False, got True"),
        ({"model_type": "llama", "sliding_window": 64}, "sliding_window must be null"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta must be a number > 0"),
        ({"dual_chunk_attention_config": {}}, "dual_chunk_attention_config must be None"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping must be None"),
        ({"bias": True}, "bias must be False, got True"),
        ({"model_type": "olmo2", "sliding_window": None}, "sliding_window must be absent"),
        ({"model_type": "olmo2", "head_dim": 32}, "head_dim must be hidden_size / num_attention"),
        (
            {"model_type": "olmo3", "sliding_window": 64},
            "rope_parameters must be absent in an olmo3 model",
        ),
        (
            {"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor of rope_parameters must stand in config.json itself too, .*"
            "got 0.5 and 1",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope"}},
            "rope type must be one of default, got 'longrope'",
        ),
        (OLMO3 | {"rope_theta": 1e4}, "rope_theta must be 500000 in an olmo3 model"),
        (OLMO3 | {"sliding_window": None}, "sliding_window must be an integer in an olmo3 model"),
        (OLMO3 | {"rope_scaling": YARN}, "rope_theta must not stand in rope_scaling of an olmo3"),
        (OLMO3 | {"layer_types": ["full_attention"]}, "layer_types must name 2 layers, got 1"),
        (GEMMA3 | {"tie_word_embeddings": False}, "tie_word_embeddings must be True, got False"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation must be 'gelu_pytorch_tanh'"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be None"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention must be Fal"),
        (GEMMA3 | {"sliding_window": None}, "sliding_window must be an integer in a gemma3_text"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e6}}, "must hold full_attention and sliding"),
        (GEMMA3 | {"rope_scaling": {"type": "linear", "factor": 8.0}}, "type must not stand in"),
        (
            GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "rope_type of sliding_attention must be 'default'",
        ),
        (
            GEMMA3 | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_type must stand in full_attention",
        ),
        (
            MINIMAX | {"use_qk_norm": "absent"},
            "use_qk_norm must be True in a minimax_m2 .* got None",
        ),
        (MINIMAX | {"use_routing_bias": False}, "use_routing_bias must be True .* got False"),
        (MINIMAX | {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid' in a minimax_m2"),
        (
            MINIMAX | {"qk_norm_type": "per_head"},
            "qk_norm_type must be 'per_layer', got 'per_head'",
        ),
        (MINIMAX | {"rotary_dim": None}, "rotary_dim must be an integer >= 1 and <= head_dim"),
        (MINIMAX | {"rotary_dim": 32}, "rotary_dim must be an integer >= 1 .* got 32 and 16"),
        (
            MINIMAX | {"rotary_dim": 8, "partial_rotary_factor": 1.0},
            r"partial_rotary_factor must be left out or rotary_dim / head_dim \(8 / 16\)",
        ),
        ({"original_max_position_embeddings": 64}, "must stand inside rope_parameters alone"),
    ],
)
def test_what_cannot_be_trained_is_refused(change: dict, message: str, dense: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        read_model_spec(damaged(dense, tmp_path / "copy", **change))


def test_older_configs_keep_rope_theta_at_the_top(dense: Path, tmp_path: Path):
    copy = damaged(dense, tmp_path / "copy", rope_parameters="absent", rope_theta=5e5)
    assert read_model_spec(copy).rope == Rope(5e5)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
        {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "rope_theta": 5e5},
        {"rope_scaling": LLAMA3 | {"type": "llama3"}, "rope_theta": 5e5},
    ],
)
def test_rotary_scaling_as_transformers_4_and_5_write_it(rope: dict, dense: Path, tmp_path: Path):
    copy = damaged(dense, tmp_path / "copy", **({"rope_parameters": "absent"} | rope))
    assert read_model_spec(copy).rope == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)


def test_a_factor_that_only_sglang_applies_is_noted(dense: Path, tmp_path: Path):
    yarn = {"rope_parameters": YARN | {"attn_factor": 0.5}}
    rope = read_model_spec(damaged(dense, tmp_path / "copy", **yarn)).rope
    assert rope.logit_factor == (0.5 * (0.1 * math.log(4) + 1)) ** 2
    assert "attn_factor 0.5 of its rotary settings" in str(yarn_note("student.model", rope))
    assert yarn_note("student.model", replace(rope, attn_factor=1.0)) is None


def test_missing_or_unreadable_config(tmp_path: Path):
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tp": 3}, "tp must divide the model's attention heads, got tp=3 and 4 attention heads"),
        ({"pp": 3}, "pp must divide the model's layers, got pp=3 and 2 layers"),
        ({"ep": 3, "dp": 3}, "ep must divide the model's experts, got ep=3 and 4 experts"),
    ],
)
def test_layouts_that_do_not_fit_the_model(parallel: dict, message: str, moe: Path):
    with pytest.raises(ValueError, match=message):
        read_model_spec(moe).check_parallel(ParallelConfig(**parallel))


def test_a_dense_model_has_no_experts_to_spread(dense: Path):
    with pytest.raises(ValueError, match="got ep=2 and 0 experts"):
        read_model_spec(dense).check_parallel(ParallelConfig(ep=2, dp=2))


def test_ranks_share_no_expert_with_biases(tmp_path: Path):
    spec = read_model_spec(tiny_gpt_oss(tmp_path / "model"))
    for etp in (1, None):
        parallel = ParallelConfig(tp=2, ep=1 if etp else 2, etp=etp)
        spec.check_parallel(parallel)
    with pytest.raises(ValueError, match=r"^learner\.parallel\.etp must be 1 .* got 2$"):
        spec.check_parallel(ParallelConfig(tp=2))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_key_value_heads_may_be_fewer_than_ranks(tp: int, moe: Path):
    spec = replace(read_model_spec(moe), num_heads=8, num_kv_heads=2)
    spec.check_parallel(ParallelConfig(tp=tp))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "words"),
    [
        (12, 3, 2, "must divide the model's key-value heads or be a multiple of them, got tp=2"),
        (12, 3, 4, "got tp=4 and 3 key-value heads"),
        (32, 1, 32, "must divide the model's rows of queries, keys and values, got tp=32"),
    ],
)
def test_heads_that_ranks_cannot_share(heads: int, kv_heads: int, tp: int, words: str, moe: Path):
    spec = replace(read_model_spec(moe), num_heads=heads, num_kv_heads=kv_heads, head_dim=2)
    with pytest.raises(ValueError, match=words):
        spec.check_parallel(ParallelConfig(tp=tp))
