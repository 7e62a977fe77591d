"""The table of names: both Megatron spellings, nothing left out."""

import pytest

from megatron_opd.models.families.keys import Key, hf_names, locate, row_of
from megatron_opd.models.families.qwen import QWEN3, QWEN3_MOE
from megatron_opd.models.families.table import family_of


@pytest.mark.parametrize(
    ("local", "engine"),
    [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        (
            "mlp.experts.local_experts.1.linear_fc1.weight",
            "mlp.experts.linear_fc1.weight1",
        ),
        ("mlp.experts.local_experts.1.linear_fc2.weight", "mlp.experts.linear_fc2.weight1"),
        ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight"),
    ],
)
def test_both_spellings_name_the_same_parameter(local: str, engine: str):
    prefix = "decoder.layers.1."
    keys = {locate(QWEN3_MOE, prefix + name, 4, 6) for name in (local, engine)}
    assert len(keys) == 1
    (key,) = keys
    assert key.layer == 5
    assert key.expert == (7 if "expert" in local else -1)


def test_the_dense_norm_before_the_mlp_has_two_spellings():
    names = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    keys = {locate(QWEN3, f"decoder.layers.0.{name}", 0, 0) for name in names}
    assert [hf_names(QWEN3, key) for key in keys] == [
        ("model.layers.0.post_attention_layernorm.weight",)
    ]


def test_global_numbers_reach_the_hugging_face_names():
    name = "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight"
    key = locate(QWEN3_MOE, name, layer_offset=10, expert_offset=4)
    assert hf_names(QWEN3_MOE, key) == (
        "model.layers.10.mlp.experts.6.gate_proj.weight",
        "model.layers.10.mlp.experts.6.up_proj.weight",
    )
    assert row_of(QWEN3_MOE, key).fusion == "gate_up"


def test_top_level_names():
    assert hf_names(QWEN3, locate(QWEN3, "output_layer.weight", 3, 0)) == ("lm_head.weight",)
    assert locate(QWEN3, "embedding.word_embeddings.weight", 3, 0) == Key(-1, 0)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "output_layer.weigh",
        "x.output_layer.weight",
    ],
)
def test_an_unknown_parameter_is_never_left_out(name: str):
    with pytest.raises(KeyError, match="no row of the qwen3 table"):
        locate(QWEN3, name, 0, 0)


def test_an_unknown_family_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"llama, .*, qwen3, .*qwen3_moe, .*got 'gpt2'"):
        family_of("gpt2")
