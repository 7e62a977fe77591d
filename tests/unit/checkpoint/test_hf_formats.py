"""Quantised checkpoints, read as plain ones: transformers' bits, and every fault in one line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.finite import first_not_finite
from megatron_opd.checkpoint.hf_files import CodedTensor
from megatron_opd.checkpoint.hf_formats import model_tensors
from megatron_opd.checkpoint.hf_reader import read_rows
from megatron_opd.checkpoint.to_hf import megatron_to_hf
from megatron_opd.checkpoint.to_megatron import hf_to_megatron
from megatron_opd.config.learner import ParallelConfig
from sglang_bridge.weights.checkpoint_formats import CheckpointFormat
from sglang_bridge.weights.dequantise import dequantised
from tests.support.coded_models import SINGLE, as_fp8, as_mxfp4
from tests.support.models import tiny_qwen3

UP = "model.layers.0.mlp.up_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("plain") / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt_oss") / "model"
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = GptOssConfig(vocab_size=64, num_hidden_layers=1, **sizes, **heads)
    torch.manual_seed(0)
    GptOssForCausalLM(config).float().save_pretrained(path)
    return path


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_fp8_is_dequantised_as_transformers_does(scales: torch.dtype, plain: Path, tmp_path: Path):
    path = as_fp8(plain, tmp_path / "fp8", scales=scales)
    files, theirs, coded = load_file(path / SINGLE), Fp8Dequantize(None), 0
    for name, stored in model_tensors(path).items():
        ours = read_rows(stored, 0, stored.shape[0])
        if not isinstance(stored, CodedTensor):
            assert torch.equal(ours, files[name])
            continue
        scale = files[f"{name}_scale_inv"]
        assert torch.equal(ours, theirs._dequantize_one(files[name], scale, torch.float32))
        assert torch.equal(read_rows(stored, 5, len(ours) - 9), ours[5:-4])
        coded += 1
    assert coded == 7
    assert dict(dequantised(files.items(), CheckpointFormat("fp8", (32, 32)))).keys() == set(
        model_tensors(path)
    )


def test_a_last_block_may_hold_fewer_rows_and_columns(plain: Path, tmp_path: Path):
    """As DeepSeek-V3's kv_a_proj_with_mqa has it, of 576 rows: no multiple of 128."""
    block = (48, 40)
    path = as_fp8(plain, tmp_path / "fp8", block)
    files, stored = load_file(path / SINGLE), model_tensors(path)[UP]
    scales, expected = files[f"{UP}_scale_inv"], files[UP].double()
    assert scales.shape == (3, 2)
    for row in range(expected.shape[0]):
        for column in range(expected.shape[1]):
            expected[row, column] *= scales[row // block[0], column // block[1]].double()
    assert torch.equal(read_rows(stored, 0, 128), expected.float())
    assert torch.equal(read_rows(stored, 47, 50), expected[47:97].float())


def test_mxfp4_is_dequantised_as_transformers_does(gpt_oss: Path, tmp_path: Path):
    path = as_mxfp4(gpt_oss, tmp_path / "mxfp4")
    files, shown = load_file(path / SINGLE), model_tensors(path)
    plain = load_file(gpt_oss / SINGLE)
    assert shown.keys() == plain.keys()
    served = dict(dequantised(reversed(files.items()), CheckpointFormat("mxfp4")))
    for name in plain:
        if plain[name].ndim != 3:
            continue
        theirs = convert_moe_packed_tensors(files[f"{name}_blocks"], files[f"{name}_scales"])
        assert shown[name].shape == tuple(plain[name].shape)
        assert torch.equal(read_rows(shown[name], 0, 3), theirs)
        assert torch.equal(read_rows(shown[name], 1, 2), theirs[1:])
        assert torch.equal(served[name], theirs)
        assert (theirs - plain[name]).abs().max() < 0.2 * plain[name].abs().max()


def test_a_conversion_makes_bfloat16_of_it(plain: Path, tmp_path: Path):
    path = as_fp8(plain, tmp_path / "fp8")
    hf_to_megatron(path, tmp_path / "megatron", parallel=ParallelConfig(), dtype=None, crew=Crew())
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", dtype=None, crew=Crew())
    back, shown = load_file(tmp_path / "hf" / SINGLE), model_tensors(path)
    assert back.keys() == shown.keys()
    for name, stored in shown.items():
        assert torch.equal(back[name], read_rows(stored, 0, stored.shape[0]).bfloat16()), name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


FP8_FAULTS: list[tuple[Callable[[Tensors], object], str]] = [
    (drop(f"{UP}_scale_inv"), "lacks .*up_proj.weight_scale_inv, the scales of"),
    (drop(UP), "up_proj.weight_scale_inv are scales, for which .* got none"),
    (put(UP, torch.Tensor.bfloat16), "for which .* must be of dtype F8_E4M3, got BF16"),
    (put(f"{UP}_scale_inv", lambda t: t[1:]), r"must have shape \[4, 2\] .* got \[3, 2\]"),
    (put(f"{UP}_scale_inv", torch.Tensor.double), "must be of dtype F32 or BF16, got F64"),
    (put(UP, lambda t: t[None]), "must have two dimensions"),
]
MXFP4_FAULTS: list[tuple[Callable[[Tensors], object], str]] = [
    (drop(f"{EXPERTS}_scales"), "lacks .*down_proj_scales, the scales of"),
    (drop(f"{EXPERTS}_blocks"), "down_proj_scales are scales, for which .* got none"),
    (put(f"{EXPERTS}_scales", lambda t: t[:, 1:]), "down_proj_scales must have shape"),
    (put(f"{EXPERTS}_blocks", lambda t: t[..., :8]), r"the shape \[experts, N, N, 16\]"),
    (put(f"{EXPERTS}_blocks", lambda t: t.to(torch.int8)), "_blocks must be of dtype U8, got I8"),
    (lambda t: t.update({EXPERTS: torch.zeros(1)}), "holds both"),
]


def fault_of(path: Path, change: Callable[[Tensors], object]) -> str:
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file(tensors, path / SINGLE, {"format": "pt"})
    with pytest.raises(ValueError, match=str(path)) as caught:
        model_tensors(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("change", "words"), FP8_FAULTS)
def test_faults_of_fp8_are_named(
    change: Callable[[Tensors], object], words: str, plain: Path, tmp_path: Path
):
    path = as_fp8(plain, tmp_path / "fp8")
    message = fault_of(path, change)
    assert re.search(words, message), message


@pytest.mark.parametrize(("change", "words"), MXFP4_FAULTS)
def test_faults_of_mxfp4_are_named(
    change: Callable[[Tensors], object], words: str, gpt_oss: Path, tmp_path: Path
):
    message = fault_of(as_mxfp4(gpt_oss, tmp_path / "mxfp4"), change)
    assert re.search(words, message), message


def test_numbers_and_scales_that_are_none_are_named(plain: Path, gpt_oss: Path, tmp_path: Path):
    fp8, mxfp4 = as_fp8(plain, tmp_path / "fp8"), as_mxfp4(gpt_oss, tmp_path / "mxfp4")
    assert first_not_finite(model_tensors(fp8)[UP]) is None
    assert first_not_finite(model_tensors(mxfp4)[EXPERTS]) is None
    tensors = load_file(fp8 / SINGLE)
    tensors[UP].view(torch.uint8)[0, 3] = 0x7F
    save_file(tensors, fp8 / SINGLE)
    assert first_not_finite(model_tensors(fp8)[UP]) == "NaN at element 3"
    tensors[f"{UP}_scale_inv"][1, 0] = torch.inf
    save_file(tensors, fp8 / SINGLE)
    assert first_not_finite(model_tensors(fp8)[UP]) == "an infinity at element 2 of its scales"
    with pytest.raises(ValueError, match=r"up_proj\.weight_scale_inv holds numbers that are not"):
        list(dequantised(tensors.items(), CheckpointFormat("fp8", (32, 32))))
    tensors = load_file(mxfp4 / SINGLE)
    tensors[f"{EXPERTS}_scales"][0, 0, 0] = 255
    save_file(tensors, mxfp4 / SINGLE)
    assert first_not_finite(model_tensors(mxfp4)[EXPERTS]) == "NaN at element 0 of its scales"
    with pytest.raises(ValueError, match="down_proj_scales holds NaN"):
        list(dequantised(tensors.items(), CheckpointFormat("mxfp4")))


def test_a_server_names_what_has_no_partner(plain: Path, tmp_path: Path):
    tensors = load_file(as_fp8(plain, tmp_path / "fp8") / SINGLE)
    format = CheckpointFormat("fp8", (32, 32))
    for name, words in (
        (f"{UP}_scale_inv", r"up_proj\.weight has no .*weight_scale_inv"),
        (UP, r"weight_scale_inv has no .*up_proj\.weight "),
    ):
        left = {key: each for key, each in tensors.items() if key != name}
        with pytest.raises(ValueError, match=words):
            list(dequantised(left.items(), format))
    wrong = tensors | {f"{UP}_scale_inv": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=r"must have the shape \(4, 2\)"):
        list(dequantised(wrong.items(), format))
