"""Quantised students and teachers: what `opd check` takes and says, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_opd.config.servers import ServerConfig
from megatron_opd.inputs.model_facts import read_served
from megatron_opd.sizing.servers import server_memory
from tests.support.cli_cases import call, refused
from tests.support.coded_models import SINGLE, as_fp8
from tests.support.models import tiny_qwen3

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
REMEDY = "give the checkpoint that it was made from"
UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
    ({"quant_method": "awq", "bits": 4}, "'awq'"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'compressed-tensors'"),
    (FP8 | {"weight_block_size": None}, "weight_block_size"),
    (FP8 | {"weight_block_size": [32, 0]}, "weight_block_size"),
    (FP8 | {"activation_scheme": "static"}, "activation_scheme"),
    (FP8 | {"fmt": "e5m2"}, "fmt of quant_method fp8"),
]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("fp8")
    return as_fp8(tiny_qwen3(base / "plain"), base / "fp8")


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_quantised_model_is_taken_and_a_note_says_what_becomes_of_it(
    role: str, fp8: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    config[role]["model"] = str(fp8)
    capsys.readouterr()
    assert call(tmp_path, config, "--data", verb="check") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "is quantised (fp8 in blocks of 32 x 32)" in said
    what = "exports are not quantised" if role == "student" else "on a CPU its servers de-quantise"
    assert what in said


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize(("described", "words"), UNKNOWN)
def test_other_formats_are_refused_with_the_remedy(
    role: str,
    described: dict[str, Any],
    words: str,
    fp8: Path,
    config: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    path = tmp_path / "model"
    path.mkdir()
    for file in fp8.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tree = json.loads((path / "config.json").read_text()) | {"quantization_config": described}
    (path / "config.json").write_text(json.dumps(tree))
    config[role]["model"] = str(path)
    capsys.readouterr()
    refused(capsys, call(tmp_path, config, verb="check"), f"{role}.model", words, REMEDY)


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_files_and_description_must_agree(
    role: str, fp8: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    plain = tiny_qwen3(tmp_path / "plain")
    tree = json.loads((plain / "config.json").read_text()) | {"quantization_config": FP8}
    (plain / "config.json").write_text(json.dumps(tree))
    config[role]["model"] = str(plain)
    capsys.readouterr()
    words = (f"{role}.model", "quant_method fp8", "the files hold no such tensor")
    refused(capsys, call(tmp_path, config, verb="check"), *words)


def test_a_quantised_checkpoint_takes_what_its_files_do(fp8: Path):
    sizes = read_served(fp8, "t.model").size
    held = server_memory(sizes, ServerConfig(model=fp8)).weights
    files = load_file(fp8 / SINGLE)
    coded = [name for name in files if f"{name}_scale_inv" in files]
    alone = sum(files[n].numel() + 4 * files[f"{n}_scale_inv"].numel() for n in coded)
    others = [n for n in files if n not in coded and not n.endswith("_scale_inv")]
    assert abs(held - alone - sum(2 * files[n].numel() for n in others)) <= len(files)
    plain = read_served(fp8.parent / "plain", "t.model").size
    assert plain.parameters == sizes.parameters, "scales are no parameters"


def test_scales_that_are_none_are_named(
    fp8: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    path = as_fp8(fp8.parent / "plain", tmp_path / "model")
    tensors = load_file(path / SINGLE)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[f"{name}_scale_inv"][0, 1] = torch.nan
    save_file(tensors, path / SINGLE, {"format": "pt"})
    config["student"]["model"] = str(path)
    capsys.readouterr()
    words = (f"tensor {name} holds NaN at element 1 of its scales",)
    refused(capsys, call(tmp_path, config, "--data", verb="check"), *words)
