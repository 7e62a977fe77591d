"""Reading and writing Hugging Face checkpoints; every mistake names file and rule."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_opd.checkpoint.convert import FreshSource, source_of
from megatron_opd.checkpoint.export import export_hf
from megatron_opd.checkpoint.hf_reader import SafetensorsSource
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.spec import Rope, read_model_spec
from tests.support.models import tiny_qwen3, tiny_qwen3_moe


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_moe(tmp_path_factory.mktemp("moe") / "model", mlp_only_layers=[0])


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type must be one of llama, mixtral, qwen2, qwen3, qwen3_moe, got 'gpt2'",
        ),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"hidden_size": "absent"}, "lacks the key 'hidden_size'"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope type must be one of default, linear, llama3, got 'yarn'",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"mlp_bias": True}, "mlp_bias must be False, got True"),
        ({"use_sliding_window": "absent", "sliding_window": 64}, "sliding_window must be null"),
        ({"rope_parameters": None}, "lacks the key 'rope_theta'"),
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


def test_missing_or_unreadable_config(tmp_path: Path):
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tp": 4}, "tp must divide the model's key-value heads, got tp=4 and 2 key-value heads"),
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


@pytest.mark.parametrize("limit", [2**40, 100_000])
def test_export_in_one_file_or_several(limit: int, moe: Path, tmp_path: Path):
    source = load_file(moe / "model.safetensors")
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()
    export_hf(iter(source.items()), moe, target, torch.float32, max_file_bytes=limit)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (limit > 2**30)
    assert not (target / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no temporary directory left"
    reader = SafetensorsSource(target)
    for name, tensor in source.items():
        shape = tuple(tensor.shape)
        assert torch.equal(reader.read(name, shape, 0, 0, shape[0]), tensor)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert torch.equal(loaded.state_dict()["lm_head.weight"], source["lm_head.weight"])
    assert AutoTokenizer.from_pretrained(target).eos_token_id == 1


def test_export_casts_and_says_so(dense: Path, tmp_path: Path):
    source = load_file(dense / "model.safetensors")
    export_hf(iter(source.items()), dense, tmp_path / "out", torch.bfloat16)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], source[name].bfloat16()) for name in source)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("torch_dtype", config.get("dtype")) == "bfloat16"


def test_an_export_that_fails_leaves_the_earlier_checkpoint(dense: Path, tmp_path: Path):
    target = tmp_path / "out"
    export_hf(iter(load_file(dense / "model.safetensors").items()), dense, target, torch.float32)

    def broken():
        yield "a", torch.zeros(2)
        raise RuntimeError("lost a rank")

    with pytest.raises(RuntimeError, match="lost a rank"):
        export_hf(broken(), dense, target, torch.float32)
    assert (target / "model.safetensors").exists()


def test_slices_and_their_mistakes(tmp_path: Path):
    tensor = torch.arange(24.0).view(4, 6)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert torch.equal(source.read("w", (4, 6), 1, 2, 3), tensor[:, 2:5])
    assert torch.equal(source.read("w", (4, 6), 0, 1, 2), tensor[1:3])
    with pytest.raises(ValueError, match="lacks the tensor v"):
        source.read("v", (4, 6), 0, 0, 4)
    with pytest.raises(ValueError, match=r"tensor w must have shape \[4, 8\] by config.json"):
        source.read("w", (4, 8), 0, 0, 4)


def test_a_fresh_initialisation_depends_on_name_and_seed_alone(dense: Path, tmp_path: Path):
    spec = read_model_spec(dense)
    whole = FreshSource(spec, 1).read("w", (400, 30), 0, 0, 400)
    part = FreshSource(spec, 1).read("w", (400, 30), 1, 10, 5)
    assert torch.equal(part, whole[:, 10:15])
    assert float(whole.std()) == pytest.approx(spec.initializer_range, rel=0.05)
    assert not torch.equal(whole, FreshSource(spec, 2).read("w", (400, 30), 0, 0, 400))
    assert not torch.equal(whole, FreshSource(spec, 1).read("v", (400, 30), 0, 0, 400))
    assert torch.equal(FreshSource(spec, 1).read("norm", (8,), 0, 0, 8), torch.ones(8))
    assert torch.equal(FreshSource(spec, 1).read("q.bias", (8,), 0, 0, 8), torch.zeros(8))
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        source_of(tmp_path, spec, None)
