"""What of a served model did not come from its checkpoint, found by SGLang's own loading."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_bridge.ports import free_port
from sglang_bridge.server import loaded
from sglang_bridge.server.entry import offer_standins
from tests.support.models import (
    tiny_glm4_moe,
    tiny_llama,
    tiny_minimax_m2,
    tiny_mixtral,
    tiny_qwen2,
    tiny_qwen2_moe,
    tiny_qwen3,
    tiny_qwen3_moe,
)

offer_standins()

ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}
FAMILIES = {
    "glm4_moe": partial(tiny_glm4_moe, first_k_dense_replace=0),
    "llama": tiny_llama,
    "minimax_m2": tiny_minimax_m2,
    "mixtral": tiny_mixtral,
    "qwen2": tiny_qwen2,
    "qwen2_moe": tiny_qwen2_moe,
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
}
Case = tuple[Path, str | None]


def load_all(cases: Sequence[Case], tp: int = 1, ep: int = 1) -> list[dict[str, Any]]:
    """What the first rank says of each checkpoint; all ranks must say the same."""
    port = str(free_port())
    listed = json.dumps([[str(path), format] for path, format in cases]).encode()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.loading_job", str(rank), str(tp), str(ep), port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(tp)
    ]
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write(listed)
        process.stdin.close()
        process.stdin = None
    said = [process.communicate(timeout=300) for process in ranks]
    found = [
        [json.loads(line[6:]) for line in out.decode().splitlines() if line.startswith("FOUND ")]
        for out, _ in said
    ]
    for each, (_, errors) in zip(found, said, strict=True):
        assert len(each) == len(cases), errors.decode()[-3000:]
        assert [case["refused"] for case in each] == [case["refused"] for case in found[0]]
    return found[0]


def variant(
    source: Path,
    target: Path,
    *,
    without: Sequence[str] = (),
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """A copy of a checkpoint that lacks some tensors, or holds others besides."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in without}
    assert len(kept) == len(tensors) - len(without)
    save_file(kept | dict(extra or {}), target / "model.safetensors", {"format": "pt"})
    return target


def tied_cases(tmp_path: Path) -> list[Case]:
    """A whole model, some with tensors that are no part of it, two with more than it has."""
    source = tiny_qwen3(tmp_path / "tied", tie_word_embeddings=True)
    other = torch.ones(3)
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": other}
    zeros = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    norm = {"model.layers.2.input_layernorm.weight": torch.ones(64), "v_head.weight": other}
    predicting = variant(source, tmp_path / "predicting", extra=norm)
    described = json.loads((predicting / "config.json").read_text())
    described["num_nextn_predict_layers"] = 1
    (predicting / "config.json").write_text(json.dumps(described))
    return [
        (source, None),
        (variant(source, tmp_path / "harmless", extra=harmless | zeros), None),
        (predicting, None),
        (variant(source, tmp_path / "bias", extra=bias), None),
        (variant(source, tmp_path / "norm", extra=norm), None),
    ]


def test_each_tensor_of_each_family_is_missed_by_name(tmp_path: Path):
    """A k of a fused qkv, a gate, a bias, one expert, a norm that starts at ones, the head."""
    cases = tied_cases(tmp_path)
    expected: list[str | None] = [None] * (len(cases) - 2)
    expected += ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.input_layernorm.weight"]
    for family, make in FAMILIES.items():
        source = make(tmp_path / family, **ONE_LAYER)
        lacking: list[tuple[Path, str | None]] = [(source, None)]
        for index, name in enumerate(load_file(source / "model.safetensors")):
            target = tmp_path / f"{family}-{index}"
            lacking.append((variant(source, target, without=[name]), name))
        formats = (None, "int8", "fp8") if family in ("qwen2", "qwen3_moe") else (None,)
        cases += [(path, format) for format in formats for path, _ in lacking]
        expected += [name for _ in formats for _, name in lacking]
    every = load_all(cases)
    for found, (path, _), name in zip(every, cases, expected, strict=True):
        if name is None:
            assert found["refused"] is None, path
        else:
            refused = found["refused"].split(": ", 1)[1].split(", which")[0].split(", ")
            assert name in refused, found
            # a quantised matrix has scales of its own, and neither was written
            assert set(refused) <= {name, f"{name}_scale"}
    named = [" ".join(each["unread"]) for each in every]
    assert named[:2] == ["", ""]
    assert "2 tensors: model.layers.2.input_layernorm.weight, v_head.weight" in named[2]
    assert set(named[3:]) == {""}


def test_ranks_agree_on_what_is_missing(tmp_path: Path):
    """The vocabulary does not divide among the ranks' blocks: its padding is not missed."""
    source = tiny_qwen3_moe(tmp_path / "whole", vocab_size=500)
    names = [
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.1.mlp.experts.0.down_proj.weight",
        "lm_head.weight",
    ]
    cases: list[Case] = [(source, None)]
    for index, name in enumerate(names):
        cases.append((variant(source, tmp_path / str(index), without=[name]), None))
    found = load_all(cases, tp=2, ep=2)
    assert found[0]["refused"] is None
    assert found[0]["unread"] == []
    for each, name in zip(found[1:], names, strict=True):
        assert f"lacks 1 tensor: {name}, which" in each["refused"]


# ---------------------------------------------------------------- quantised layouts


class Layer(torch.nn.Module):
    """Parameters as quantised layers have them."""

    def __init__(self) -> None:
        super().__init__()
        made = {
            "weight_packed": torch.empty(8, 16, dtype=torch.int32),
            "weight_bytes": torch.empty(8, 16, dtype=torch.uint8),
            "weight_fp8": torch.empty(8, 16, dtype=torch.float8_e4m3fn),
            "weight_scale": torch.empty(8),
            "block_scale": torch.empty(8, 2, dtype=torch.uint8),
            "block_scale_mx": torch.empty(8, 2, dtype=torch.float8_e8m0fnu),
            "input_scale": torch.ones(()),
            "k_scale": torch.tensor(-1.0),
            "bias": torch.zeros(8),
        }
        for name, data in made.items():
            self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))


def filled() -> tuple[torch.nn.Sequential, Layer, dict[str, float]]:
    """A layer that is poisoned and then loaded, but for the scales that may be left out."""
    layer = Layer()
    model = torch.nn.Sequential(layer)
    defaults = loaded.poison(model)
    with torch.no_grad():
        # holds the pattern of each type here and there, as packed numbers may
        for name in ("weight_packed", "weight_bytes"):
            held = loaded._held(getattr(layer, name))
            assert held is not None
            held.fill_(3)
            held[2, 5] = loaded._pattern(getattr(layer, name))
        layer.weight_fp8.copy_(torch.ones(8, 16))
        layer.weight_scale.fill_(0.5)
        layer.block_scale.fill_(127)  # a scale of 1, in both
        layer.block_scale_mx.view(torch.uint8).fill_(127)
        layer.bias.zero_()
    return model, layer, defaults


def test_quantised_parameters_that_are_loaded_are_whole():
    model, layer, defaults = filled()
    assert loaded.missing(model, defaults) == []
    assert float(layer.input_scale) == 1.0
    assert float(layer.k_scale) == -1.0


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("weight_packed", (slice(2, 4), slice(None))),
        ("weight_packed", (slice(None), slice(0, 3))),
        ("weight_bytes", (slice(7, 8), slice(None))),
        ("weight_fp8", (slice(3, 4), slice(1, 2))),
        ("weight_scale", (slice(4, 5),)),
        ("block_scale", (slice(4, 5), slice(None))),
        ("block_scale_mx", (slice(4, 5), slice(1, 2))),
        ("bias", (slice(0, 1),)),
    ],
)
def test_a_part_of_a_quantised_parameter_is_missed(name: str, part: tuple[slice, ...]):
    model, layer, defaults = filled()
    held = loaded._held(getattr(layer, name))
    assert held is not None
    held[part] = loaded._pattern(getattr(layer, name))
    assert loaded.missing(model, defaults) == [f"0.{name}"]


def test_a_constant_does_not_stand_in_for_weights():
    """A norm is made as ones and a bias as zeros; neither is what an untrained one would be."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(4))
    assert loaded.missing(model, loaded.poison(model)) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_numbers_that_are_not_finite_are_told_from_memory_that_nobody_wrote(dtype: torch.dtype):
    """They are another check's; here they were loaded."""
    linear = torch.nn.Linear(4, 4, dtype=dtype)
    defaults = loaded.poison(linear)
    with torch.no_grad():
        linear.weight.fill_(float("nan"))
        linear.bias.fill_(float("inf"))
    assert loaded.missing(linear, defaults) == []


def test_what_threads_of_a_loader_read_counts():
    weights = {name: torch.ones(4) for name in ("one", "two", "never")}
    held = {name: torch.zeros(4) for name in weights}
    reads = loaded.Reads()
    with reads, reads.in_threads(), ThreadPoolExecutor() as pool:
        for name, tensor in reads.watched(weights.items()):
            if name != "never":
                pool.submit(held[name].copy_, tensor)
    assert reads.unread == {"never"}
    assert all(bool(held[name].all()) for name in ("one", "two"))
    bare = loaded.Reads()
    with bare, ThreadPoolExecutor() as pool:
        for _, tensor in bare.watched(weights.items()):
            pool.submit(held["one"].copy_, tensor)
    assert bare.unread == {*weights}, "the control: a mode sees its own thread alone"
