"""A Megatron checkpoint is not cut by another number of heads than it was trained with."""

import io
import json
import os
import pickle
import resource
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnBackend
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_opd.checkpoint.convert import source_of
from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.restricted_metadata import read_metadata
from megatron_opd.checkpoint.stated_heads import check_heads, heads_of
from megatron_opd.checkpoint.to_hf import megatron_to_hf
from megatron_opd.checkpoint.to_megatron import hf_to_megatron
from megatron_opd.cli.main import main
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.spec import ModelSpec, read_model_spec
from tests.support.latent_models import tiny_deepseek_v3
from tests.support.models import tiny_qwen2

HEADS = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16, "hidden_size": 64}


def state(**settings: Any) -> dict[str, Any]:
    """What Megatron-LM keeps beside a model's tensors."""
    others = {"params_dtype": torch.bfloat16, "attention_backend": AttnBackend.auto, "rope": None}
    arguments = Namespace(**(others | settings))
    found = {"args": arguments, "checkpoint_version": 3.0, "iteration": 5, "rng": torch.ones(3)}
    return found | {"sorted": OrderedDict(a=torch.Size([3]))}


def common(path: Path, **settings: Any) -> None:
    """As Megatron-LM wrote it before Megatron-Core 0.19."""
    torch.save(state(**settings), path / "common.pt")


def shards(path: Path, **settings: Any) -> None:
    """As it has written it since: one more object among the shards."""
    (path / "common.pt").unlink(missing_ok=True)
    stream, file, key = io.BytesIO(), "__9_0.distcp", "common_state/shard_0_1"
    torch.save([state(**settings)], stream)
    (path / file).write_bytes(b"others" + stream.getvalue() + b"others")
    whole = (path / ".metadata").exists()
    found = read_metadata(path) if whole else Metadata({}, storage_data={})
    found.state_dict_metadata[key] = BytesStorageMetadata()
    length = len(stream.getvalue())
    found.storage_data[MetadataIndex(key)] = _StorageInfo(file, len(b"others"), length)
    (path / ".metadata").write_bytes(pickle.dumps(found))


def bridge(path: Path, **settings: Any) -> None:
    model = {"_target_": "megatron.bridge.Qwen2ModelProvider", "rotary_base": 1e6, **settings}
    text = yaml.safe_dump({"checkpoint": {"save": "x"}, "model": model})
    (path / "run_config.yaml").write_text(text)


def learner(path: Path, **settings: Any) -> None:
    counts = (settings[name] for name in ("num_attention_heads", "num_query_groups", "kv_channels"))
    heads = dict(zip(("num_heads", "num_kv_heads", "head_dim"), counts, strict=True))
    (path / "state.json").write_text(json.dumps({"format": 2, "heads": heads}))


WRITERS = {
    ".metadata": shards,
    "common.pt": common,
    "run_config.yaml": bridge,
    "state.json": learner,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that was saved, and one of other heads whose tensors are as large."""
    root = tmp_path_factory.mktemp("models")
    tiny_qwen2(root / "saved", seed=3)
    other = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    tiny_qwen2(root / "other", seed=4, **other)
    one, two = (load_file(root / name / "model.safetensors") for name in ("saved", "other"))
    assert {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in two.items()}
    hf_to_megatron(
        root / "saved", root / "megatron", parallel=ParallelConfig(), dtype=None, crew=Crew()
    )
    (root / "megatron" / "config.json").unlink()
    (root / "megatron" / "tensors.json").unlink()  # which no other program writes
    return root


@pytest.fixture
def source(models: Path, tmp_path: Path) -> Path:
    """The checkpoint; its common.pt tells how tensors are named, and no heads."""
    path = tmp_path / "source"
    path.mkdir()
    for file in (models / "megatron").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.mark.parametrize("name", WRITERS)
def test_other_heads_than_the_checkpoint_tells_are_refused(name: str, models: Path, source: Path):
    WRITERS[name](source, **HEADS)
    convert = partial(megatron_to_hf, source, dtype=None, crew=Crew())
    said = rf"{name} says 4 heads \(2 of keys\) of 16 features, .* 8 heads \(4 of keys\) of 8"
    with pytest.raises(ValueError, match=said) as told:
        convert(source.parent / "hf", model=models / "other")
    assert "\n" not in str(told.value)
    with pytest.raises(ValueError, match=said):
        source_of(source, read_model_spec(models / "other"), None)
    assert not (source.parent / "hf").exists()
    report = convert(source.parent / "hf", model=models / "saved")
    assert report.notes == ()
    expected = load_file(models / "saved" / "model.safetensors")
    found = load_file(source.parent / "hf" / "model.safetensors")
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_where_nothing_tells_one_line_says_so(
    models: Path, source: Path, capsys: pytest.CaptureFixture[str]
):
    words = ("convert", "megatron-to-hf", source, source.parent / "hf", "--model", models / "other")
    assert main([*map(str, words)]) == 0
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith(f"note: {source} holds nothing that tells its attention heads")
    assert line.endswith(f"other{os.sep}config.json")
    assert json.loads(output.out)["notes"] == [line.removeprefix("note: ")]


@pytest.mark.parametrize(
    ("writer", "settings"),
    [
        (common, HEADS | {"kv_channels": None}),
        (bridge, HEADS | {"kv_channels": None}),
        (common, HEADS | {"group_query_attention": True}),
        (shards, HEADS | {"kv_channels": None}),
    ],
)
def test_what_follows_from_other_settings(
    writer: Callable[..., None], settings: dict[str, Any], models: Path, tmp_path: Path
):
    writer(tmp_path, **settings)
    assert check_heads(tmp_path, read_model_spec(models / "saved"))
    with pytest.raises(ValueError, match="says 4 heads"):
        check_heads(tmp_path, read_model_spec(models / "other"))


@pytest.mark.parametrize("settings", [{"num_query_groups": None}, {"group_query_attention": False}])
def test_without_groups_every_head_has_keys(settings: dict[str, Any], tmp_path: Path):
    """Megatron-LM keeps num_query_groups 1 where it is not used."""
    model = tiny_qwen2(tmp_path / "model", num_key_value_heads=4)
    common(tmp_path, **(HEADS | {"num_query_groups": 1} | settings))
    assert check_heads(tmp_path, read_model_spec(model)) == ("common.pt",)


class Calls:
    """A pickle of it calls `function` when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def pickled(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(path / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", data)


def test_a_pickle_runs_nothing_and_changes_nothing(models: Path, tmp_path: Path):
    spec, before = read_model_spec(models / "saved"), dict(vars(Namespace))
    marker = tmp_path / "ran"
    calls = [Calls(os.system, f"touch {marker}"), Calls(exec, f"open({str(marker)!r}, 'w')")]
    found = {"args": Namespace(**HEADS, more=calls), "calls": calls}
    pickled(tmp_path, pickle.dumps(found))
    assert check_heads(tmp_path, spec) == ("common.pt",)
    # Namespace itself, with its attributes set
    pickled(tmp_path, b"cargparse\nNamespace\nN}X\x01\x00\x00\x00aK\x01s\x86b.")
    assert check_heads(tmp_path, spec) == ()
    assert not marker.exists()
    assert dict(vars(Namespace)) == before


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x07", b"p134217727\n"])
def test_a_pickle_takes_no_more_memory_than_it_holds(put: bytes, models: Path, tmp_path: Path):
    """Python's reader makes room for whatever number it is told to keep something by."""
    pickled(tmp_path, b"\x80\x02}" + put + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert check_heads(tmp_path, read_model_spec(models / "saved")) == ()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".metadata", b"PK"),
        ("common.pt", b"PK"),
        ("state.json", b"[1]"),
        ("state.json", b'{"heads": {"num_heads": 4}}'),
        ("state.json", b'{"heads": {"num_heads": true, "num_kv_heads": 2, "head_dim": 16}}'),
        ("run_config.yaml", b"model: !!python/object:os.system {}"),
        ("run_config.yaml", b"model: [1"),
        ("run_config.yaml", b"\xff"),
        ("run_config.yaml", b"- model"),
        ("run_config.yaml", b"model: {num_attention_heads: 0, num_query_groups: 2}"),
    ],
)
def test_what_cannot_be_read_tells_nothing(name: str, content: bytes, models: Path, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    assert check_heads(tmp_path, read_model_spec(models / "other")) == ()


def answer(path: Path, spec: ModelSpec) -> str:
    try:
        return ",".join(check_heads(path, spec))
    except ValueError as error:
        return str(error)


@given(st.integers(0, 200), st.integers(0, 3), st.binary(max_size=3))
def test_a_damaged_pickle_tells_nothing_or_a_count(models: Path, at: int, cut: int, put: bytes):
    spec, path = read_model_spec(models / "saved"), models / "damaged"
    path.mkdir(exist_ok=True)
    whole = bytearray(pickle.dumps({"args": Namespace(**HEADS)}, protocol=2))
    at %= len(whole)
    whole[at : at + cut] = put
    pickled(path, bytes(whole))
    said = answer(path, spec)
    assert said in ("", "common.pt") or "common.pt says" in said


def test_heads_are_kept_as_the_learner_writes_them(models: Path, tmp_path: Path):
    spec = read_model_spec(models / "saved")
    text = json.dumps({"heads": asdict(heads_of(spec))})
    (tmp_path / "state.json").write_text(text)
    assert check_heads(tmp_path, spec) == ("state.json",)


def test_of_latent_attention_the_count_of_heads_alone_tells(tmp_path: Path):
    """Megatron's programs state kv_channels there as if it were hidden_size / heads."""
    spec = read_model_spec(tiny_deepseek_v3(tmp_path / "model"))
    assert spec.head_dim == 24
    bridge(tmp_path, **HEADS | {"num_query_groups": 4})
    assert check_heads(tmp_path, spec) == ("run_config.yaml",)
    bridge(tmp_path, **HEADS | {"num_attention_heads": 8, "num_query_groups": 8})
    with pytest.raises(ValueError, match=r"run_config\.yaml says 8 heads .* config\.json 4 heads"):
        check_heads(tmp_path, spec)
