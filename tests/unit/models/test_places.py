"""Tensors that files hold fused: split and joined bit for bit, read by ranges of rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_opd.checkpoint import hf_reader
from megatron_opd.checkpoint.hf_files import check_complete
from megatron_opd.checkpoint.hf_reader import SafetensorsSource
from megatron_opd.checkpoint.packing import packed, part_of
from megatron_opd.models.families.family import Packed
from megatron_opd.models.families.keys import hf_names
from megatron_opd.models.families.mixtral import MIXTRAL
from megatron_opd.models.families.qwen import QWEN3_MOE
from megatron_opd.models.places import Place, file_groups, places
from megatron_opd.models.rope import Rope
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import expected_tensors, model_keys

GATE, UP = (f"mlp.experts.{{e}}.{part}_proj.weight" for part in ("gate", "up"))
DOWN = "mlp.experts.{e}.down_proj.weight"
QKV = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
SPEC = ModelSpec(
    QWEN3_MOE, 2, 12, 6, 2, 2, 10, 7, 64, Rope(1e4), 1e-6, False, 0.02, num_experts=3,
    experts_per_token=2, expert_ffn_size=5, moe_layers=(True, True),
)  # fmt: skip


def spec_of(*forms: Packed) -> ModelSpec:
    return replace(SPEC, family=replace(QWEN3_MOE, packed=forms))


FORMS = {
    "one after the other": (Packed("self_attn.qkv_proj.weight", QKV),),
    "experts": (
        Packed("mlp.experts.gate_up_proj", (GATE, UP), experts=True),
        Packed("mlp.experts.down_proj", (DOWN,), experts=True),
    ),
    "transposed, in turns": (
        Packed("mlp.experts.gate_up_proj", (GATE, UP), True, True, True),
        Packed("mlp.experts.down_proj", (DOWN,), experts=True, transposed=True),
    ),
    "in turns": (Packed("self_attn.kv_proj.weight", QKV[1:], interleaved=True),),
    "transposed": (Packed("self_attn.o_proj.kernel", ("self_attn.o_proj.weight",), False, True),),
}


def model_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = expected_tensors(spec).items()
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_fused_tensors_is_read_by_slices(form: str, tmp_path: Path):
    spec = spec_of(*FORMS[form])
    model = model_of(spec)
    held = dict(packed(model.items(), places(spec)))
    for each in FORMS[form]:
        assert f"model.layers.1.{each.name}" in held
    save_file(held, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, spec)
    check_complete(source.tensors, spec, tmp_path)
    for name, tensor in model.items():
        shape = tuple(tensor.shape)
        assert torch.equal(source.read(name, shape, 0, 1, 1), tensor[1:2]), name
        if tensor.ndim == 2:
            assert torch.equal(source.read(name, shape, 1, 2, 3), tensor[:, 2:5]), name
    again = packed(((n, source.read(n, tuple(t.shape), 0, 0, len(t))) for n, t in model.items()),
                   places(spec))  # fmt: skip
    assert all(torch.equal(tensor, held[name]) for name, tensor in again)


def test_what_the_mixture_of_gpt_oss_holds():
    """By transformers' own formula: gate is every other column of [experts, in, 2 * out]."""
    spec = spec_of(*FORMS["transposed, in turns"])
    model, layer = model_of(spec), "model.layers.1.mlp.experts"
    whole = dict(packed(model.items(), places(spec)))[f"{layer}.gate_up_proj"]
    assert whole.shape == (3, 12, 10)
    x = torch.randn(4, 12)
    gate_up = x @ whole[2]
    expected = model[f"{layer}.2.gate_proj.weight"], model[f"{layer}.2.up_proj.weight"]
    assert torch.allclose(gate_up[..., ::2], x @ expected[0].t(), atol=1e-5)
    assert torch.allclose(gate_up[..., 1::2], x @ expected[1].t(), atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    heights=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    experts=st.integers(0, 3),
    transposed=st.booleans(),
    interleaved=st.booleans(),
    matrix=st.booleans(),
)
def test_split_then_joined_is_the_same(
    heights: list[int], experts: int, transposed: bool, interleaved: bool, matrix: bool
):
    heights = [heights[0]] * len(heights) if interleaved else heights
    tail, transposed = ((3,) if matrix else ()), transposed and matrix
    shape = (sum(heights), *tail)
    shape = shape[::-1] if transposed else shape
    shape = (experts, *shape) if experts else shape
    whole = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
    where = {
        f"{expert}.{at}": Place(
            "fused", shape, (height, *tail), expert if experts else None, transposed,
            at if interleaved else sum(heights[:at]), len(heights) if interleaved else 1,
        )
        for expert in range(max(1, experts))
        for at, height in enumerate(heights)
    }  # fmt: skip
    parts = {name: part_of(whole, place).clone() for name, place in where.items()}
    assert sorted(v for part in parts.values() for v in part.flatten().tolist()) == sorted(
        whole.flatten().tolist()
    )
    ((name, joined),) = packed(parts.items(), where)
    assert (name, joined.tolist()) == ("fused", whole.tolist())


def test_a_part_is_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = spec_of(*FORMS["one after the other"])
    save_file(dict(packed(model_of(spec).items(), places(spec))), tmp_path / "model.safetensors")
    source, rows = SafetensorsSource(tmp_path, spec), list[int]()
    original = hf_reader.read_rows

    def counted(stored: object, start: int, length: int) -> torch.Tensor:
        rows.append(length)
        return original(stored, start, length)

    monkeypatch.setattr(hf_reader, "read_rows", counted)
    source.read("model.layers.0.self_attn.k_proj.weight", (4, 12), 0, 1, 2)
    assert rows == [2]


def test_mistakes_name_the_tensor_of_the_file(tmp_path: Path):
    spec = spec_of(*FORMS["one after the other"])
    held = dict(packed(model_of(spec).items(), places(spec)))
    name = "model.layers.1.self_attn.qkv_proj.weight"
    for bad, message in (
        ({k: v for k, v in held.items() if k != name}, f"lacks 1 tensor: {name}$"),
        (held | {name: torch.zeros(3, 12)}, rf"{name} must have shape \[20, 12\] .*got \[3, 12\]"),
        (held | {f"{name}x": torch.zeros(1)}, rf"holds 1 tensor: {name}x, which"),
    ):
        save_file(bad, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            check_complete(SafetensorsSource(tmp_path, spec).tensors, spec, tmp_path)


def test_parts_of_one_tensor_share_a_type_and_all_come():
    spec = spec_of(*FORMS["one after the other"])
    model = model_of(spec)
    name = "model.layers.0.self_attn.v_proj.weight"
    with pytest.raises(ValueError, match=r"must share a dtype, got .*v_proj\.weight torch.float16"):
        dict(packed((model | {name: model[name].half()}).items(), places(spec)))
    del model[name]
    with pytest.raises(ValueError, match=r"parts of model\.layers\.0.*qkv_proj.* are missing"):
        dict(packed(model.items(), places(spec)))


def test_what_one_tensor_of_a_file_needs_is_written_together():
    groups = file_groups(SPEC, model_keys(SPEC))
    assert {len(group) for group in groups} == {1}
    groups = file_groups(spec_of(*FORMS["experts"]), model_keys(SPEC))
    names = [{n for key in g for n in hf_names(QWEN3_MOE, key)} for g in groups if len(g) > 1]
    assert len(names) == 4  # gate and up, and down, of two layers
    assert [key for group in groups for key in group] == list(model_keys(SPEC))


MIXTURE = replace(SPEC, family=MIXTRAL)
EXPERT = "model.layers.1.block_sparse_moe.experts.2"


@pytest.mark.parametrize(
    ("published", "held"),
    [
        (f"{EXPERT}.w1.weight", ("experts.gate_up_proj", 2, 0)),
        (f"{EXPERT}.w3.weight", ("experts.gate_up_proj", 2, 5)),
        (f"{EXPERT}.w2.weight", ("experts.down_proj", 2, 0)),
        ("model.layers.1.block_sparse_moe.gate.weight", ("gate.weight", None, 0)),
    ],
)
def test_mixtures_are_read_as_transformers_holds_them(published: str, held: tuple):
    tensor, index, start = held
    name = f"model.layers.1.mlp.{tensor}"
    place = places(MIXTURE, {name})[published]
    assert (place.name, place.index, place.start) == (name, index, start)
    assert places(MIXTURE)[published].name == published
