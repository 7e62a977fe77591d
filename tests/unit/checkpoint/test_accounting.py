"""Everything that a Megatron checkpoint holds is written, or named."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.checkpoint.accounting import hf_numbers, megatron_numbers
from megatron_opd.checkpoint.convert import source_of
from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.digest import Numbers
from megatron_opd.checkpoint.megatron_reader import DESCRIPTION, MegatronSource
from megatron_opd.checkpoint.to_hf import megatron_to_hf
from megatron_opd.checkpoint.to_megatron import hf_to_megatron
from megatron_opd.cli.main import main
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.families.keys import Key
from megatron_opd.models.spec import read_model_spec
from megatron_opd.models.tensors import model_keys
from tests.support.models import tiny_llama, tiny_mixtral, tiny_qwen2, tiny_qwen3

LAYER = re.compile(r"(.*\.layers\.)(\d+)\.(.*)")


def native(source: Path, target: Path, described: Path) -> Path:
    """The same checkpoint with a tensor for all layers, as Megatron's own programs save it."""
    stored = MegatronSource(source, read_model_spec(described))
    flat: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[int, torch.Tensor]] = {}
    for key in stored.model_tensors:
        ((_, piece),) = stored.stored_pieces(key)
        found = LAYER.fullmatch(key)
        if found is None:
            flat[key] = piece
        else:
            layers.setdefault(found[1] + found[3], {})[int(found[2])] = piece
    flat |= {name: torch.stack([by[i] for i in sorted(by)]) for name, by in layers.items()}
    for name in [name for name in flat if name.endswith("_w")]:
        gate, up = flat.pop(name), flat.pop(name[:-1] + "v")
        flat[name[:-2]] = torch.cat([gate, up], dim=1)
    others = {f"optimizer.state.exp_avg.{name}": tensor for name, tensor in flat.items()}
    dcp.save(flat | others, checkpoint_id=target, no_dist=True)
    shutil.copy(source / DESCRIPTION, target / DESCRIPTION)
    return target


def qwen2(tmp_path: Path) -> Path:
    return tiny_qwen2(tmp_path / "model", num_hidden_layers=2)


def qwen3(tmp_path: Path) -> Path:
    return tiny_qwen3(tmp_path / "model")


DROPPED: dict[str, tuple[Callable[..., Path], Callable[[Path], Path], str]] = {
    "biases": (qwen2, lambda p: tiny_llama(p, num_hidden_layers=2), r"linear_qkv\.bias"),
    "norms of queries": (qwen3, tiny_llama, r"k_layernorm\.weight"),
    "a layer": (
        qwen2,
        lambda p: tiny_qwen2(p, num_hidden_layers=1),
        r"decoder\.layers\.(1\.)?(mlp|self_attention)",
    ),
    "the head": (
        qwen2,
        lambda p: tiny_qwen2(p, num_hidden_layers=2, tie_word_embeddings=True),
        r"1 tensor: output_layer\.weight \[512, 64\]",
    ),
}


@pytest.mark.parametrize("form", ["apart", "native"])
@pytest.mark.parametrize("dropped", DROPPED)
def test_what_config_json_does_not_name_is_refused(dropped: str, form: str, tmp_path: Path):
    """By every reader: the conversion and the learner."""
    make, describe, message = DROPPED[dropped]
    model, described = make(tmp_path), describe(tmp_path / "described")
    megatron = tmp_path / "megatron"
    hf_to_megatron(model, megatron, parallel=ParallelConfig(), dtype=None, crew=Crew())
    if form == "native":
        megatron = native(megatron, tmp_path / "native", model)
    whole = megatron_to_hf(megatron, tmp_path / "hf", dtype=None, crew=Crew(), model=model)
    spec = read_model_spec(model)
    assert hf_numbers(model, spec, None) == megatron_numbers(megatron, spec, None)
    assert whole.tensor_bytes == 4 * hf_numbers(tmp_path / "hf", spec, None).count
    with pytest.raises(ValueError, match=message) as raised:
        megatron_to_hf(megatron, tmp_path / "out", dtype=None, crew=Crew(), model=described)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=message):
        source_of(megatron, read_model_spec(described), None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "refused"),
    [
        ("value_head.weight", True),
        ("model.mtp.layers.0.weight", True),
        ("optimizer.state.exp_avg.model.decoder.final_layernorm.weight", False),
        ("model.decoder.final_layernorm._extra_state", False),
    ],
)
def test_tensors_beside_the_model_are_named(key: str, refused: bool, tmp_path: Path):
    """Under any prefix, but for what is no model's: an optimizer's, a module's own state."""
    model = tiny_qwen2(tmp_path / "model")
    spec = read_model_spec(model)
    hf_to_megatron(model, tmp_path / "m", parallel=ParallelConfig(), dtype=None, crew=Crew())
    stored = MegatronSource(tmp_path / "m", spec)
    flat = {f"model.{k}": next(stored.stored_pieces(k))[1] for k in stored.model_tensors}
    dcp.save(flat | {key: torch.ones(2, 3)}, checkpoint_id=tmp_path / "beside", no_dist=True)
    shutil.copy(tmp_path / "m" / DESCRIPTION, tmp_path / "beside" / DESCRIPTION)
    source = MegatronSource(tmp_path / "beside", spec)
    if refused:
        name = re.escape(f"1 tensor: {key.removeprefix('model.')} [2, 3]")
        with pytest.raises(ValueError, match=name):
            source.checked_keys()
    else:
        source.checked_keys()


def test_rows_that_pad_the_vocabulary_are_counted(tmp_path: Path):
    model = tiny_qwen2(tmp_path / "model", vocab_size=301)
    parallel = ParallelConfig(tp=2)
    hf_to_megatron(model, tmp_path / "m", parallel=parallel, dtype=None, crew=Crew())
    report = megatron_to_hf(tmp_path / "m", tmp_path / "hf", dtype=None, crew=Crew())
    assert report.padding_rows == 1
    spec = read_model_spec(model)
    assert megatron_numbers(tmp_path / "m", spec, None) == hf_numbers(model, spec, None)


def test_a_tied_head_that_is_stored_is_the_embedding(tmp_path: Path):
    """As some programs save it; another head cannot be kept."""
    model = tiny_qwen2(tmp_path / "model", tie_word_embeddings=True)
    spec = read_model_spec(model)
    hf_to_megatron(model, tmp_path / "m", parallel=ParallelConfig(), dtype=None, crew=Crew())
    stored = MegatronSource(tmp_path / "m", spec)
    flat = {key: next(stored.stored_pieces(key))[1] for key in stored.model_tensors}
    head = flat["embedding.word_embeddings.weight"].clone()
    for change, refused in ((0.0, False), (1.0, True)):
        head[7, 3] += change
        target = tmp_path / str(refused)
        dcp.save(flat | {"output_layer.weight": head}, checkpoint_id=target, no_dist=True)
        shutil.copy(tmp_path / "m" / DESCRIPTION, target / DESCRIPTION)
        source = MegatronSource(target, spec)
        if refused:
            with pytest.raises(ValueError, match=r"1 tensor: output_layer\.weight"):
                source.checked_keys()
        else:
            source.checked_keys()


def test_verify_does_not_trust_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A plan that leaves out what config.json does not name, as it once did: same logits."""
    model, described = qwen2(tmp_path), tiny_llama(tmp_path / "llama", num_hidden_layers=1)

    def forgets(source: MegatronSource) -> list[Key]:
        return list(model_keys(source.spec))

    hf_to_megatron(model, tmp_path / "m", parallel=ParallelConfig(), dtype=None, crew=Crew())
    (tmp_path / "m" / "config.json").unlink()
    monkeypatch.setattr(MegatronSource, "checked_keys", forgets)
    words = ("convert", "megatron-to-hf", tmp_path / "m", tmp_path / "hf", "--model", described)
    capsys.readouterr()  # what made the model
    assert main([*map(str, words), "--verify"]) == 1
    note, error = capsys.readouterr().err.splitlines()
    assert "must be the same, they are not as many" in error
    assert "tells its attention heads" in note


OTHERS: dict[str, dict[str, Any]] = {
    "num_heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    "vocab_size": {"vocab_size": 256},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
    "norm_eps": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("field", OTHERS)
def test_config_json_of_a_model_of_the_same_shapes_is_refused(field: str, tmp_path: Path):
    """Not as damage: other heads would cut queries, keys and values otherwise."""
    model = tiny_qwen2(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2)
    described = tiny_qwen2(tmp_path / "described", **OTHERS[field])
    hf_to_megatron(model, tmp_path / "m", parallel=ParallelConfig(), dtype=None, crew=Crew())
    with pytest.raises(ValueError, match=rf"describes another model than .*: {field} is ") as told:
        megatron_to_hf(tmp_path / "m", tmp_path / "hf", dtype=None, crew=Crew(), model=described)
    assert "\n" not in str(told.value)
    same = tiny_qwen2(
        tmp_path / "same",
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    megatron_to_hf(tmp_path / "m", tmp_path / "hf", dtype=None, crew=Crew(), model=same)


def test_what_lies_around_megatron_checkpoints_is_named(tmp_path: Path):
    model = tiny_qwen2(tmp_path / "model")
    root, legacy = tmp_path / "root", tmp_path / "legacy" / "iter_0000010" / "mp_rank_00"
    (root / "iter_0000010").mkdir(parents=True)
    legacy.mkdir(parents=True)
    (legacy / "model_optim_rng.pt").write_bytes(b"")
    old = r"is a legacy Megatron checkpoint \(mp_rank_00 with pickles\)"
    for source, message in (
        (root, r"`opd convert megatron-to-hf .*/root/iter_0000010 DST"),
        *((path, old) for path in (legacy, legacy.parent, legacy.parent.parent)),
    ):
        with pytest.raises(ValueError, match=message):
            megatron_to_hf(source, tmp_path / "hf", dtype=None, crew=Crew(), model=model)


def test_verify_counts_in_both_directions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tiny_mixtral(tmp_path / "model", vocab_size=301)
    spec = read_model_spec(model)
    expected = hf_numbers(model, spec, None).count
    one = ("convert", "hf-to-megatron", model, tmp_path / "m", "--tp", 2)
    two = ("convert", "megatron-to-hf", tmp_path / "m", tmp_path / "hf")
    for words in (one, two):
        assert main([*map(str, words), "--verify"]) == 0
        assert json.loads(capsys.readouterr().out)["numbers"] == expected


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.randoms())
def test_numbers_do_not_depend_on_order_or_cuts(values: list[float], random):
    whole = Numbers().plus(torch.tensor(values))
    random.shuffle(values)
    cut = random.randrange(len(values) + 1)
    parts = Numbers().plus(torch.tensor(values[:cut])).plus(torch.tensor(values[cut:]))
    # each NaN has its bits
    assert parts == whole or any(value != value for value in values)


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=40), st.data())
def test_another_number_shows(values: list[int], data: st.DataObject):
    at = data.draw(st.integers(0, len(values) - 1))
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        tensor = torch.tensor(values).to(dtype)
        other = tensor.clone()
        other[at] += 1
        if not torch.equal(tensor, other):
            assert Numbers().plus(tensor) != Numbers().plus(other)
    assert Numbers().plus(torch.zeros(2)) != Numbers().plus(torch.zeros(3))
