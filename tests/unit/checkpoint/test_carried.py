"""Tensors that no text goes through are named, and stay byte for byte in all that is written."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_opd.checkpoint.accounting import hf_numbers, megatron_numbers
from megatron_opd.checkpoint.carried import CARRIED
from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.export import export_hf
from megatron_opd.checkpoint.hf_files import INDEX, SINGLE, check_complete, stored_tensors
from megatron_opd.checkpoint.hf_reader import SafetensorsSource
from megatron_opd.checkpoint.to_hf import megatron_to_hf
from megatron_opd.checkpoint.to_megatron import hf_to_megatron
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.inputs.weights import unread_note
from megatron_opd.models.spec import read_model_spec
from megatron_opd.models.tensors import expected_tensors
from tests.support.carried_models import add_tensors, predicted_layer
from tests.support.delta_models import published_qwen3_5, tiny_qwen3_5, tiny_qwen3_5_moe
from tests.support.latent_models import tiny_deepseek_v3
from tests.support.models import tiny_glm4_moe, tiny_qwen3

Tensors = dict[str, torch.Tensor]


def _described(path: Path, **changes: object) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def _glm(path: Path) -> tuple[Path, Tensors]:
    return tiny_glm4_moe(path), predicted_layer(path, "model.layers.2.")


def _deepseek(path: Path) -> tuple[Path, Tensors]:
    _described(tiny_deepseek_v3(path), num_nextn_predict_layers=1)
    return path, predicted_layer(path, "model.layers.3.")


def _qwen(path: Path) -> tuple[Path, Tensors]:
    tiny_qwen3_5(path)
    tower = {
        "model.visual.patch_embed.proj.bias": torch.randn(5),
        "model.visual.scale": torch.ones(()),
    }
    return path, predicted_layer(path, "mtp.layers.0.") | tower


def _with_images(text: Path) -> tuple[Path, Tensors]:
    path = published_qwen3_5(text, text.with_name("published"))
    held = load_file(path / SINGLE)
    carried = {name: each for name, each in held.items() if name.startswith("model.visual.")}
    return path, carried | {"mtp.fc.weight": torch.randn(64, 128).bfloat16()}


MAKERS: dict[str, Callable[[Path], tuple[Path, Tensors]]] = {
    "glm 4.5": _glm,
    "deepseek v3": _deepseek,
    "qwen3.5": _qwen,
    "qwen3.5, published class": lambda path: _with_images(tiny_qwen3_5(path)),
    "qwen3.5 moe, published class": lambda path: _with_images(tiny_qwen3_5_moe(path)),
}


@pytest.fixture(scope="module", params=MAKERS)
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tensors]:
    """A checkpoint in the published form, and what it holds besides the model's tensors."""
    path, tensors = MAKERS[request.param](tmp_path_factory.mktemp("published") / "model")
    return add_tensors(path, tensors), tensors


def own_tensors(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's own, as a learner yields them."""
    spec = read_model_spec(source)
    stored = SafetensorsSource(source, spec)
    for name, shape in expected_tensors(spec).items():
        yield name, stored.read(name, shape, 0, 0, shape[0])


def held(path: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def require_bytes(found: Tensors, expected: Tensors) -> None:
    assert found.keys() >= expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        one, other = (each.reshape(-1).view(torch.uint8) for each in (found[name], tensor))
        assert found[name].shape == tensor.shape, name
        assert torch.equal(one, other), name


def require_whole(path: Path) -> None:
    """Every tensor is in the index, and transformers loads the directory as its class."""
    stored = stored_tensors(path)
    check_complete(stored, read_model_spec(path), path)
    if (path / INDEX).exists():
        assert json.loads((path / INDEX).read_text())["weight_map"].keys() == stored.keys()
    (named,) = json.loads((path / "config.json").read_text())["architectures"]
    given = getattr(transformers, named).from_pretrained(path, output_loading_info=True)
    assert not given[1]["missing_keys"]


@pytest.mark.parametrize("limit", [2**40, 50_000])
def test_an_export_holds_them(limit: int, published: tuple[Path, Tensors], tmp_path: Path):
    source, carried = published
    tensors = load_file(source / SINGLE)
    own = ((name, each + 1) for name, each in own_tensors(source))
    export_hf(own, source, tmp_path / "out", torch.bfloat16, max_file_bytes=limit)
    found = held(tmp_path / "out")
    assert found.keys() == tensors.keys()
    require_bytes(found, carried)
    require_whole(tmp_path / "out")


def forth(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    hf_to_megatron(source, target, parallel=ParallelConfig(), dtype=dtype, crew=Crew())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_conversion_there_and_back_holds_them(
    dtype: torch.dtype | None, published: tuple[Path, Tensors], tmp_path: Path
):
    source, carried = published
    forth(source, tmp_path / "megatron", dtype)
    require_bytes(load_file(tmp_path / "megatron" / CARRIED), carried)
    megatron_to_hf(
        tmp_path / "megatron", tmp_path / "hf", dtype=None, crew=Crew(), max_file_bytes=50_000
    )
    found, tensors = held(tmp_path / "hf"), load_file(source / SINGLE)
    assert found.keys() == tensors.keys()
    require_bytes(found, carried if dtype else tensors)
    require_whole(tmp_path / "hf")
    spec = read_model_spec(source)
    assert hf_numbers(source, spec, dtype) == megatron_numbers(tmp_path / "megatron", spec, dtype)


def test_a_learners_weights_get_them_from_the_model(
    published: tuple[Path, Tensors], tmp_path: Path
):
    """The Megatron directory of a learner has neither them nor a config.json."""
    source, carried = published
    forth(source, tmp_path / "megatron")
    for name in (CARRIED, "config.json"):
        (tmp_path / "megatron" / name).unlink()
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", dtype=None, crew=Crew(), model=source)
    require_bytes(held(tmp_path / "hf"), carried)


def test_an_export_from_a_converted_source_holds_them(
    published: tuple[Path, Tensors], tmp_path: Path
):
    source, carried = published
    forth(source, tmp_path / "megatron")
    export_hf(own_tensors(source), tmp_path / "megatron", tmp_path / "out", torch.float32)
    require_bytes(held(tmp_path / "out"), carried)


def test_a_damaged_one_is_named(published: tuple[Path, Tensors], tmp_path: Path):
    forth(published[0], tmp_path / "megatron")
    file = tmp_path / "megatron" / CARRIED
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged: its checksum must be"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", dtype=None, crew=Crew())


def test_quantised_ones_are_written_in_bfloat16(tmp_path: Path):
    source = _described(tiny_qwen3_5(tmp_path / "model"))
    numbers = torch.randn(128, 64).to(torch.float8_e4m3fn)
    name, scale = "mtp.fc.weight", torch.tensor([[0.5]])
    add_tensors(source, {name: numbers, f"{name}_scale_inv": scale})
    format = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    format |= {"activation_scheme": "dynamic", "fmt": "e4m3"}
    _described(source, quantization_config=format)
    forth(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", dtype=None, crew=Crew())
    found = held(tmp_path / "hf")
    require_bytes(found, {name: (numbers.float() * 0.5).bfloat16()})
    assert f"{name}_scale_inv" not in found


def test_they_are_named_apart_from_what_no_export_holds(
    published: tuple[Path, Tensors], tmp_path: Path
):
    source, carried = published
    line = unread_note(source, "student.model", read_model_spec(source))
    assert line is not None
    assert f"holds {len(carried)} tensors: " in line
    assert line.endswith("which no text goes through: exports hold them unchanged")
    plain = add_tensors(tiny_qwen3(tmp_path / "plain"), {"mtp.fc.weight": torch.ones(2)})
    line = unread_note(plain, "student.model", read_model_spec(plain))
    assert line is not None
    assert "mtp.fc.weight, which nothing reads and no export" in line


def test_other_tensors_are_refused_as_ever(published: tuple[Path, Tensors], tmp_path: Path):
    """A layer beyond those that config.json counts, a bias, of a family that has such layers."""
    for further, counted, bad in (
        ({"model.layers.3.input_layernorm.weight": torch.ones(64)}, 1, "model.layers.3."),
        ({"model.layers.2.input_layernorm.weight": torch.ones(64)}, 0, "model.layers.2."),
        ({"model.layers.1.mlp.gate.bias": torch.ones(4)}, 1, "model.layers.1.mlp.gate.bias"),
    ):
        source = tiny_glm4_moe(tmp_path / bad)
        _described(source, num_nextn_predict_layers=counted)
        add_tensors(source, further)
        with pytest.raises(ValueError, match=f"holds 1 tensor: {bad}"):
            forth(source, tmp_path / "megatron")
