"""The tables against what transformers writes: names and shapes of every family."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_opd.checkpoint.hf_files import check_tensors, stored_tensors
from megatron_opd.checkpoint.hf_reader import SafetensorsSource
from megatron_opd.learner.attention import rotary_frequencies
from megatron_opd.models.families.table import FAMILIES
from megatron_opd.models.places import places
from megatron_opd.models.rope import Rope
from megatron_opd.models.spec import read_model_spec
from tests.support.models import tiny_llama, tiny_qwen2, tiny_qwen3
from tests.support.students import STUDENTS


def test_every_family_is_tested():
    assert STUDENTS.keys() == FAMILIES.keys()


@pytest.mark.parametrize(
    ("family", "tied"),
    [(name, tied) for name in STUDENTS for tied in (False, True) if tied or name != "gemma3_text"],
)
def test_published_names_and_shapes(family: str, tied: bool, tmp_path: Path):
    overrides = {"mlp_only_layers": [1]} if family in ("qwen2_moe", "qwen3_moe") else {}
    model = STUDENTS[family].make(tmp_path / "model", tie_word_embeddings=tied, **overrides)
    spec, source = read_model_spec(model), load_file(model / "model.safetensors")
    published = {place.name: place.shape for place in places(spec).values()}
    assert published == {name: tuple(t.shape) for name, t in source.items()}
    check_tensors(stored_tensors(model), spec, model)
    assert AutoConfig.from_pretrained(model).architectures == [spec.family.architecture]


@pytest.mark.parametrize(
    "family",
    ["glm4_moe", "minimax_m2", "mixtral", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe"],
)
def test_the_spelling_in_memory_holds_the_same_tensors(family: str, tmp_path: Path):
    overrides = {"first_k_dense_replace": 0} if family == "glm4_moe" else {}
    published = STUDENTS[family].make(tmp_path / "published", **overrides)
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    model.save_pretrained(tmp_path / "held", save_original_format=False)
    spec, held = read_model_spec(published), stored_tensors(tmp_path / "held")
    assert "model.layers.0.mlp.experts.gate_up_proj" in held
    check_tensors(held, spec, tmp_path)
    reader = SafetensorsSource(tmp_path / "held", spec)
    for name, tensor in load_file(published / "model.safetensors").items():
        shape = tuple(tensor.shape)
        assert torch.equal(reader.read(name, shape, 0, 0, shape[0]), tensor), name
        if tensor.ndim == 2:
            assert torch.equal(reader.read(name, shape, 1, 3, 5), tensor[:, 3:8]), name
    with pytest.raises(ValueError, match="lacks the tensor"):  # an expert beyond the stack
        reader.read("model.layers.0.mlp.experts.4.up_proj.weight", (64, 64), 0, 0, 64)


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize(
    "rope",
    [
        Rope(10000.0),
        Rope(1e6, "linear", 4.0),
        Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        Rope(5e5, "llama3", 32.0, 2.0, 8.0, 64),
    ],
)
def test_rotary_frequencies_are_transformers_bit_for_bit(rope: Rope, head_dim: int, tmp_path: Path):
    parameters = {
        "rope_theta": rope.theta,
        "rope_type": rope.type,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }
    known = {"default": 2, "linear": 3, "llama3": 6}[rope.type]
    path = tiny_llama(
        tmp_path / "model",
        head_dim=head_dim,
        num_hidden_layers=1,
        rope_parameters=dict(list(parameters.items())[:known]),
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    expected = model.model.rotary_emb.inv_freq
    assert read_model_spec(path).rope.type == rope.type
    ours = rotary_frequencies(read_model_spec(path).rope, head_dim, torch.device("cpu"))
    assert torch.equal(ours, expected)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize(
    "changes",
    [
        {"original_max_position_embeddings": 64},
        {"rope_theta": 1e6, "factor": 1.5, "beta_fast": 8.5, "beta_slow": 2},
        {"original_max_position_embeddings": 32768, "truncate": False},
        {"mscale": 0.707, "mscale_all_dim": 1.5, "factor": 40},
        {"mscale": 0.707, "attention_factor": 0.1 * math.log(4) + 1},
        {"factor": 1.0, "original_max_position_embeddings": 4},  # no pair of features between
    ],
)
def test_yarn_is_transformers_bit_for_bit(changes: dict, head_dim: int, tmp_path: Path):
    path = tiny_qwen3(
        tmp_path / "model", head_dim=head_dim, num_hidden_layers=1, rope_parameters=YARN | changes
    )
    expected = AutoModelForCausalLM.from_pretrained(path).model.rotary_emb
    rope = read_model_spec(path).rope
    assert torch.equal(rotary_frequencies(rope, head_dim, torch.device("cpu")), expected.inv_freq)
    assert rope.logit_factor == expected.attention_scaling**2


def test_an_added_rope_scaling_turns_the_learner_as_it_turns_transformers(tmp_path: Path):
    """Before: it was ignored, and the servers' model was another one."""
    path = tiny_qwen3(tmp_path / "model", num_hidden_layers=1)
    file = path / "config.json"
    described = json.loads(file.read_text())
    described["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    described["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    file.write_text(json.dumps(described))
    expected = AutoModelForCausalLM.from_pretrained(path).model.rotary_emb.inv_freq
    spec = read_model_spec(path)
    assert torch.equal(rotary_frequencies(spec.rope, 16, torch.device("cpu")), expected)


def test_a_dtype_that_cannot_be_trained_is_named(tmp_path: Path):
    model = tiny_qwen2(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight must be of dtype .*, got I8"):
        check_tensors(stored_tensors(model), read_model_spec(model), model)
