"""Writing Hugging Face checkpoints: whole, cast and said so, or the earlier one stays."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_opd.checkpoint.export import export_hf
from megatron_opd.checkpoint.hf_reader import SafetensorsSource
from megatron_opd.models.spec import read_model_spec


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
    reader = SafetensorsSource(target, read_model_spec(moe))
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


@pytest.mark.parametrize(
    ("dropped", "added", "message"),
    [
        (["lm_head.weight"], {}, "lacks 1 tensor: lm_head.weight"),
        ([], {"model.norm.bias": torch.zeros(2)}, "holds 1 tensor: model.norm.bias"),
    ],
)
def test_an_export_holds_a_model_of_its_config_json(
    dropped: list[str],
    added: dict[str, torch.Tensor],
    message: str,
    dense: Path,
    tmp_path: Path,
):
    tensors = load_file(dense / "model.safetensors") | added
    kept = ((name, tensor) for name, tensor in tensors.items() if name not in dropped)
    with pytest.raises(ValueError, match=message):
        export_hf(kept, dense, tmp_path / "out", torch.float32)
    assert list(tmp_path.iterdir()) == []
