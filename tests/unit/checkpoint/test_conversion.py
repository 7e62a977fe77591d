"""Conversions both ways: bitwise, resumable, and every damage told in one line."""

import dataclasses
import errno
import io
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader

from megatron_opd.checkpoint import part_dir, to_hf, to_megatron
from megatron_opd.checkpoint.conversion import ConversionReport
from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.hf_files import INDEX, SINGLE, file_tensors
from megatron_opd.checkpoint.megatron_reader import MegatronSource
from megatron_opd.checkpoint.to_hf import megatron_to_hf
from megatron_opd.checkpoint.to_megatron import hf_to_megatron
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.spec import read_model_spec
from megatron_opd.sizing.layout import stage_layers
from tests.support.models import tiny_llama, tiny_mixtral, tiny_phi3, tiny_qwen2

UNIT_BYTES = 60_000


def forth(source: Path, target: Path, **options: Any) -> ConversionReport:
    defaults = {"parallel": ParallelConfig(), "dtype": None, "crew": Crew()}
    return hf_to_megatron(source, target, **(defaults | {"unit_bytes": UNIT_BYTES} | options))


def back(source: Path, target: Path, **options: Any) -> ConversionReport:
    return megatron_to_hf(source, target, **({"dtype": None, "crew": Crew()} | options))


def weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mixtral(tmp_path_factory.mktemp("mixtral") / "model", vocab_size=301)


@pytest.fixture(scope="module")
def converted(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "megatron"
    forth(mixtral, target, parallel=ParallelConfig(tp=2, pp=2, dp=2, ep=2))
    return target


def test_there_and_back_is_bitwise(mixtral: Path, converted: Path, tmp_path: Path):
    report = back(converted, tmp_path / "hf", max_file_bytes=200_000)
    require_equal(weights(tmp_path / "hf"), weights(mixtral))
    assert report.units == len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 3
    assert {p.name for p in mixtral.iterdir()} - {SINGLE} <= {
        p.name for p in (tmp_path / "hf").iterdir()
    }
    assert (tmp_path / "hf" / "config.json").read_bytes() == (mixtral / "config.json").read_bytes()
    again = forth(tmp_path / "hf", tmp_path / "again")  # from several files with an index
    assert again.tensor_bytes == report.tensor_bytes
    back(tmp_path / "again", tmp_path / "one")
    require_equal(load_file(tmp_path / "one" / SINGLE), weights(mixtral))


def test_what_files_hold_fused_is_fused_again(tmp_path: Path):
    model = tiny_phi3(tmp_path / "model", vocab_size=301)
    forth(model, tmp_path / "megatron", parallel=ParallelConfig(tp=2, pp=2))
    back(tmp_path / "megatron", tmp_path / "hf", max_file_bytes=100_000)
    found = weights(tmp_path / "hf")
    require_equal(found, weights(model))
    assert "model.layers.1.self_attn.qkv_proj.weight" in found


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_stage_has_files_of_its_own(vpp: int, tmp_path: Path):
    model = tiny_llama(tmp_path / "model", num_hidden_layers=4)
    parallel, target = ParallelConfig(pp=2, vpp=vpp), tmp_path / "megatron"
    hf_to_megatron(model, target, parallel=parallel, dtype=None, crew=Crew(), unit_bytes=50_000)
    stages = stage_layers(read_model_spec(model), parallel)
    layers = [{layer for chunk in chunks for layer in chunk} for chunks in stages]
    held: dict[str, set[str]] = {}
    for index, place in FileSystemReader(target).read_metadata().storage_data.items():
        held.setdefault(place.relative_path, set()).add(index.fqn)
    homes = {"embedding.word_embeddings.weight": 0}
    homes |= {"output_layer.weight": 1, "decoder.final_layernorm.weight": 1}
    for keys in held.values():
        parts = (key.split(".") for key in keys if key.startswith("decoder.layers."))
        found = {stage for part in parts for stage in (0, 1) if int(part[2]) in layers[stage]}
        found |= {homes[key] for key in keys & homes.keys()}
        assert len(found) == 1, keys
    assert len(held) > 4


def test_a_cast_is_said_in_the_configuration(mixtral: Path, tmp_path: Path):
    forth(mixtral, tmp_path / "half", dtype=torch.bfloat16)
    back(tmp_path / "half", tmp_path / "hf")
    half = {name: tensor.bfloat16() for name, tensor in weights(mixtral).items()}
    require_equal(weights(tmp_path / "hf"), half)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    back(tmp_path / "half", tmp_path / "wide", dtype=torch.float32)
    wide = {name: tensor.float() for name, tensor in half.items()}
    require_equal(weights(tmp_path / "wide"), wide)


def test_tensors_of_several_dtypes_keep_them(mixtral: Path, tmp_path: Path):
    source = tmp_path / "source"
    shutil.copytree(mixtral, source)
    mixed = {n: t if "gate" in n else t.bfloat16() for n, t in weights(mixtral).items()}
    save_file(mixed, source / SINGLE)
    forth(source, tmp_path / "megatron")
    back(tmp_path / "megatron", tmp_path / "hf")
    require_equal(weights(tmp_path / "hf"), mixed)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file(mixed | {name: mixed[name].float()}, source / SINGLE)
    with pytest.raises(ValueError, match="tensors of one parameter must share a dtype"):
        forth(source, tmp_path / "other")


def test_what_older_checkpoints_carry_too(tmp_path: Path):
    source = tiny_qwen2(tmp_path / "source", tie_word_embeddings=True)
    tensors = weights(source)
    head = tensors["model.embed_tokens.weight"].clone()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors | buffer | {"lm_head.weight": head}, source / SINGLE)
    forth(source, tmp_path / "megatron")
    back(tmp_path / "megatron", tmp_path / "hf")
    require_equal(weights(tmp_path / "hf"), tensors)
    head[17, 3] += 1
    save_file(tensors | {"lm_head.weight": head}, source / SINGLE)
    with pytest.raises(ValueError, match=r"lm_head\.weight must equal model\.embed_tokens"):
        forth(source, tmp_path / "other")


class Killed(BaseException):
    """Stands for a signal: nothing handles it."""


def dies_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose `call`-th call does its work and dies before it can say so."""
    count = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        result = function(*args, **kwargs)
        if count == call:
            raise Killed
        return result

    return dying


def test_a_killed_conversion_goes_on_where_it_was(
    mixtral: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = tmp_path / "megatron"
    monkeypatch.setattr(to_megatron, "write_unit", dies_at(4, to_megatron.write_unit))
    with pytest.raises(Killed):
        forth(mixtral, target)
    monkeypatch.undo()
    assert not target.exists()
    part = tmp_path / "megatron.part"
    damaged = sorted(part.glob("__*_0.distcp"))[-1]
    damaged.write_bytes(damaged.read_bytes()[:100])  # half of a unit, as a power cut leaves it
    kept = {path.name: path.stat().st_mtime_ns for path in part.glob("__[0-2]_0.distcp")}
    report = forth(mixtral, target)
    assert report.units_kept == 3 < report.units
    assert {n: (target / n).stat().st_mtime_ns for n in kept} == kept, "made twice"
    assert not part.exists()
    monkeypatch.setattr(to_hf, "write_safetensors", dies_at(2, to_hf.write_safetensors))
    with pytest.raises(Killed):
        back(target, tmp_path / "hf", max_file_bytes=200_000)
    monkeypatch.undo()
    assert not (tmp_path / "hf").exists()
    assert back(target, tmp_path / "hf", max_file_bytes=200_000).units_kept == 1
    require_equal(weights(tmp_path / "hf"), weights(mixtral))


def test_another_conversion_does_not_go_on_with_the_part(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = tmp_path / "megatron"
    monkeypatch.setattr(to_megatron, "write_unit", dies_at(2, to_megatron.write_unit))
    with pytest.raises(Killed):
        forth(mixtral, target)
    monkeypatch.undo()
    for options in ({"dtype": torch.bfloat16}, {"parallel": ParallelConfig(tp=2)}):
        with pytest.raises(ValueError, match=r"megatron\.part is left from another conversion"):
            forth(mixtral, target, **options)
    forth(mixtral, target)
    with pytest.raises(ValueError, match="exists already"):
        forth(mixtral, target)


class _FullDisk:
    """A stream that takes `room` bytes."""

    def __init__(self, stream: Any, room: int) -> None:
        self._stream, self._room = stream, room

    def write(self, data: Any) -> int:
        self._room -= memoryview(data).nbytes
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device", self._stream.name)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def test_a_disk_that_fills_up(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from contextlib import contextmanager

    real = FileSystem.create_stream

    @contextmanager
    def full(self: FileSystem, path: Any, mode: str):
        with real(self, path, mode) as stream:
            yield _FullDisk(stream, 30_000) if "__3_" in str(path) else stream

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", full)
        with pytest.raises(ValueError, match=r"^disk full writing .*__3_0\.distcp; free some"):
            forth(mixtral, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
    assert forth(mixtral, tmp_path / "megatron").units_kept == 3


def test_a_disk_without_room_is_seen_at_the_start(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(part_dir.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"^disk full: .* needs 0\.00 GB more, 0\.00 GB are free"):
        forth(mixtral, tmp_path / "megatron")


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        tensors = load_file(path / SINGLE)
        change(tensors)
        save_file(tensors, path / SINGLE)

    return spoil


def _config(**changes: Any) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


def _index(weight_map: dict[str, str]) -> Callable[[Path], None]:
    return lambda path: (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))  # type: ignore[return-value]


def _indexed(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        names = dict.fromkeys(load_file(path / SINGLE), SINGLE)
        change(names)
        (path / INDEX).write_text(json.dumps({"weight_map": names}))

    return spoil


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "architecture": (_config(model_type="gpt2"), r"one of .*llama, .*, qwen3, .*qwen3_moe"),
    "no config": (lambda p: (p / "config.json").unlink(), r"has no config\.json"),
    "no weights": (lambda p: (p / SINGLE).unlink(), r"holds neither model\.safetensors nor"),
    "cut": (lambda p: _cut(p / SINGLE, 1), r"is incomplete: its header describes"),
    "header cut": (lambda p: _cut(p / SINGLE, None), r"its header is incomplete"),
    "missing": (_tensors(lambda t: t.pop(NORM)), r"lacks 1 tensor: model\.norm\.weight"),
    "several missing": (
        _tensors(lambda t: [t.pop(n) for n in list(t) if "q_proj" in n or "gate" in n]),
        r"lacks 4 tensors: model\.layers\.0\..*, \.\.\.",
    ),
    "extra": (
        _tensors(lambda t: t.update({"model.layers.2.input_layernorm.weight": t[NORM].clone()})),
        r"holds 1 tensor: model\.layers\.2\.input_layernorm\.weight, which a mixtral model",
    ),
    "shape": (
        _tensors(lambda t: t.update({NORM: torch.ones(65)})),
        r"model\.norm\.weight must have shape \[64\] by config\.json, got \[65\]",
    ),
    "transposed": (
        _tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()})),
        r"lm_head\.weight must have shape \[301, 64\] by config\.json, got \[64, 301\]",
    ),
    "dtype": (
        _tensors(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
        r"model\.norm\.weight must be of dtype F32, BF16, F16, got F8_E4M3",
    ),
    "index without entry": (_indexed(lambda m: m.pop(NORM)), r"lacks an entry for 1 tensor: model"),
    "index of another tensor": (
        _indexed(lambda m: m.update(extra=SINGLE)),
        r"model\.safetensors lacks extra, which model\.safetensors\.index\.json places there",
    ),
    "index of no file": (_index({"a": "other.safetensors"}), r"lacks other\.safetensors, which"),
    "index no JSON": (lambda p: (p / INDEX).write_text("{"), r"cannot read .*index\.json"),
    "index without map": (lambda p: (p / INDEX).write_text("{}"), r"cannot read .*index\.json"),
    "layers": (_config(num_hidden_layers=3), r"lacks \d+ tensors: model\.layers\.2\."),
}


def _cut(file: Path, num_bytes: int | None) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:50] if num_bytes is None else data[:-num_bytes])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_source_that_is_not_whole(damage: str, mixtral: Path, tmp_path: Path):
    spoil, message = DAMAGES[damage]
    source = tmp_path / "source"
    shutil.copytree(mixtral, source)
    spoil(source)
    with pytest.raises(ValueError, match=message) as raised:
        forth(source, tmp_path / "megatron")
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"], "something was begun"


def test_any_byte_of_the_header_may_be_wrong(tmp_path: Path):
    """Whatever is wrong is a ValueError, or changes nothing that matters."""
    source = tiny_llama(tmp_path / "source", num_hidden_layers=1)
    file = source / SINGLE
    whole, rng = file.read_bytes(), random.Random(0)
    length = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for trial in range(150):
        place = rng.randrange(length)
        byte = bytes([rng.randrange(256)])
        file.write_bytes(whole[:place] + byte + whole[place + 1 :])
        message = ""
        try:
            forth(source, tmp_path / "megatron")
        except ValueError as error:
            message = str(error)
        refused += bool(message)
        assert "\n" not in message, trial
        assert (tmp_path / "megatron").exists() == (not message), trial
        shutil.rmtree(tmp_path / "megatron", ignore_errors=True)
        shutil.rmtree(tmp_path / "megatron.part", ignore_errors=True)
    assert refused > 100


def _flip(path: Path) -> None:
    """One bit of a weight."""
    spec = read_model_spec(path)
    norm = MegatronSource(path, spec).read(NORM, (spec.hidden_size,), 0, 0, spec.hidden_size)
    weight = norm.numpy().tobytes()
    (file,) = [file for file in path.glob("*.distcp") if weight in file.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(weight) + 7] ^= 1
    file.write_bytes(bytes(data))


def _exchange(path: Path) -> None:
    """Another tensor in the place of a piece, and as many bytes of it as one could ask for."""
    described = pickle.loads((path / ".metadata").read_bytes())
    (index,) = [
        index for index in described.storage_data if index.fqn.endswith("final_layernorm.weight")
    ]
    (path / "__9_9.distcp").write_bytes(_saved(torch.zeros(3)))
    place = dataclasses.replace(
        described.storage_data[index], relative_path="__9_9.distcp", offset=0, length=2**62
    )
    described.storage_data[index] = place
    (path / ".metadata").write_bytes(pickle.dumps(described))


def _saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def _forget(path: Path) -> None:
    checksums = json.loads((path / "tensors.json").read_text())
    checksums[NORM]["digest"] = "0" * 16
    (path / "tensors.json").write_text(json.dumps(checksums))


MEGATRON_DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit": (_flip, r"cannot read a piece of|is damaged: its checksum must be"),
    "checksum": (_forget, r"tensor model\.norm\.weight is damaged: its checksum must be 0000"),
    "checksums no JSON": (lambda p: (p / "tensors.json").write_text("["), r"cannot read .*tensors"),
    "another tensor": (
        _exchange,
        r"a piece of .* must have shape \[64\], got \[3\]",
    ),
    "cut": (lambda p: _cut(max(p.glob("*.distcp")), 2000), r"cannot read a piece of"),
    "file gone": (lambda p: (p / "__0_0.distcp").unlink(), r"__0_0\.distcp: cannot read a piece"),
    "metadata cut": (lambda p: _cut(p / ".metadata", 2000), r"cannot read .*\.metadata"),
    "metadata gone": (lambda p: (p / ".metadata").unlink(), r"lacks metadata\.json or \.metadata"),
    "config gone": (lambda p: (p / "config.json").unlink(), r"is a Megatron checkpoint"),
    "more layers": (_config(num_hidden_layers=3), r"lacks the tensor decoder\.layers\.2\."),
    "wider": (_config(intermediate_size=256), r"must have shape \[256, 64\] by config\.json"),
    "more ids": (_config(vocab_size=400), r"word_embeddings\.weight must have shape \[400, 64\]"),
}


@pytest.mark.parametrize("damage", MEGATRON_DAMAGES)
def test_a_megatron_checkpoint_that_is_not_whole(damage: str, converted: Path, tmp_path: Path):
    spoil, message = MEGATRON_DAMAGES[damage]
    source = tmp_path / "source"
    shutil.copytree(converted, source)
    spoil(source)
    with pytest.raises(ValueError, match=message) as raised:
        back(source, tmp_path / "hf")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "hf").exists()


def test_what_was_written_wrong_is_not_published(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = to_megatron.write_unit

    def wrong(path: Path, unit: int, *rest: Any) -> dict[str, Any]:
        record = real(path, unit, *rest)
        if unit == 2:
            entry = next(iter(record["tensors"].values()))
            entry["digest"] = "f" * 16
        return record

    monkeypatch.setattr(to_megatron, "write_unit", wrong)
    with pytest.raises(ValueError, match="is damaged: its checksum must be ffff"):
        forth(mixtral, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


def test_half_a_character_in_a_header_is_refused(tmp_path: Path):
    """As safetensors does; JSON may escape it, but UTF-8 has no such text."""
    file = tmp_path / "model.safetensors"
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    header = f'{{"__metadata__": {{"format": "\\ud800"}}, "a": {entry}}}'.encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        file_tensors(file)
