"""Every exporter leaves the same files beside the weights: all that is not weights."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.description import OTHER_BYTES, described
from megatron_opd.checkpoint.export import export_hf
from megatron_opd.checkpoint.to_hf import megatron_to_hf
from megatron_opd.checkpoint.to_megatron import hf_to_megatron
from megatron_opd.config.learner import ParallelConfig

KEPT = (
    "LICENSE",
    "NOTICE.txt",
    "USE_POLICY.md",
    "added_tokens.json",
    "additional_chat_templates/rag.jinja",
    "additional_chat_templates/tool_use.jinja",
    "bpe.codes",
    "chat_template.jinja",
    "chat_template.json",
    "configuration_own.py",
    "generation_config.json",
    "merges.txt",
    "modeling_own.py",
    "preprocessor_config.json",
    "processor_config.json",
    "qwen.tiktoken",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "tekken.json",
    "tokenization_own.py",
    "tokenizer.model",
    "tokenizer.model.v3",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)
LEFT = (
    ".gitattributes",
    ".cache/huggingface/tokenizer.json",
    "README.md",
    "adapter_config.json",
    "all_results.json",
    "checkpoint-7/model.safetensors",
    "checkpoint-7/tokenizer.json",
    "consolidated.00.pth",
    "hf_quant_config.json",
    "metadata.json",
    "onnx/model.onnx",
    "onnx/tokenizer.json",
    "optimizer.pt",
    "original/consolidated.00.pth",
    "original/tokenizer.model",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin.index.json",
    "rng_state_0.pth",
    "runs/events.out.tfevents.1",
    "tensors.json",
    "tokenizer.pkl",
    "trainer_state.json",
    "training_args.bin",
)


def files_of(folder: Path) -> dict[str, bytes]:
    """What a folder holds, without a checkpoint's weights and configuration."""
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    written = ("model.safetensors", "config.json", "metadata.json", "tensors.json", "common.pt")
    others = {n: p for n, p in found.items() if n not in written and p.suffix != ".distcp"}
    others.pop(".metadata", None)
    return {name: path.read_bytes() for name, path in others.items()}


@pytest.fixture
def source(dense: Path, tmp_path: Path) -> Path:
    """A model with files of every kind beside it."""
    path = tmp_path / "source"
    shutil.copytree(dense, path)
    for name in (*KEPT, *LEFT):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        if not (path / name).exists():
            (path / name).write_text(json.dumps(name), encoding="utf-8")
    (path / "generation_config.json").write_text("{}")
    (path / "huge.json").write_bytes(b" " * (OTHER_BYTES + 1))
    os.mkfifo(path / "pipe.json")
    return path


def by_run(source: Path, target: Path) -> None:
    tensors = load_file(source / "model.safetensors").items()
    export_hf(iter(tensors), source, target, torch.float32)


def to_megatron(source: Path, target: Path) -> None:
    hf_to_megatron(source, target, parallel=ParallelConfig(), dtype=None, crew=Crew())


def there_and_back(source: Path, target: Path) -> None:
    megatron = target.with_name("megatron")
    to_megatron(source, megatron)
    megatron_to_hf(megatron, target, dtype=None, crew=Crew())


def from_another_model(source: Path, target: Path) -> None:
    megatron = target.with_name("megatron")
    to_megatron(source, megatron)
    megatron_to_hf(megatron, target, dtype=None, crew=Crew(), model=source)


EXPORTERS = (by_run, to_megatron, there_and_back, from_another_model)


@pytest.mark.parametrize("export", EXPORTERS)
def test_all_that_is_not_weights_is_copied(
    export: Callable[[Path, Path], None], source: Path, tmp_path: Path
):
    export(source, tmp_path / "out")
    found = files_of(tmp_path / "out")
    expected = {"tokenizer.json", "tokenizer_config.json", *KEPT}
    assert set(found) == expected
    assert found == {name: (source / name).read_bytes() for name in expected}


@pytest.mark.parametrize("as_files", [True, False])
def test_transformers_finds_every_named_template(as_files: bool, dense: Path, tmp_path: Path):
    source = tmp_path / "source"
    shutil.copytree(dense, source)
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}", "rag": "r"}
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(source, save_jinja_files=as_files)
    assert (source / "additional_chat_templates").is_dir() == as_files
    by_run(source, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == templates


OWN = "{{ messages[0].content }}\n{# the run's #}"


def own_by_run(source: Path, target: Path) -> None:
    tensors = load_file(source / "model.safetensors").items()
    export_hf(iter(tensors), source, target, torch.float32, chat_template=OWN)


def own_from_megatron(source: Path, target: Path) -> None:
    megatron = target.with_name("megatron")
    to_megatron(source, megatron)
    megatron_to_hf(megatron, target, dtype=None, crew=Crew(), model=source, chat_template=OWN)


@pytest.mark.parametrize("export", [own_by_run, own_from_megatron])
@pytest.mark.parametrize("as_files", [True, False])
def test_a_runs_own_template_is_the_only_one(
    export: Callable[[Path, Path], None], as_files: bool, dense: Path, tmp_path: Path
):
    """Before: an export rendered with the templates of the model that the run began with."""
    source = tmp_path / "source"
    shutil.copytree(dense, source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source, save_jinja_files=as_files)
    export(source, tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.chat_template == OWN
    assert "tool_use" not in (tmp_path / "out" / "tokenizer_config.json").read_text()
    assert exported.get_vocab() == tokenizer.get_vocab()


def test_a_hubs_cache_of_links_is_copied_as_files(source: Path, tmp_path: Path):
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "7f"
    blobs.mkdir(parents=True)
    for index, path in enumerate(sorted(source.rglob("*"))):
        if path.is_file():
            link = snapshot / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, blobs / str(index))
            link.symlink_to(os.path.relpath(blobs / str(index), link.parent))
    by_run(snapshot, tmp_path / "out")
    assert set(files_of(tmp_path / "out")) == {"tokenizer.json", "tokenizer_config.json", *KEPT}
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_links_that_lead_elsewhere_are_followed_where_a_tokenizer_reads_them(
    dense: Path, tmp_path: Path
):
    """As in a folder of links to another model; nothing else from outside is taken along."""
    source, outside = tmp_path / "source", tmp_path / "outside"
    source.mkdir()
    (outside / "templates").mkdir(parents=True)
    (outside / "templates" / "tool_use.jinja").write_text("x")
    (outside / "secret.json").write_text("x")
    for path in dense.iterdir():
        (source / path.name).symlink_to(path)
    (source / "secret.json").symlink_to(outside / "secret.json")
    (source / "notes").symlink_to(outside / "secret.json")
    (source / "additional_chat_templates").symlink_to(outside / "templates")
    (source / "gone.json").symlink_to(outside / "gone.json")
    (source / "loop").symlink_to(source)
    (source / "inside.json").symlink_to(source / "tokenizer.json")
    (source / "copy.txt").write_text("x")
    (source / "again.txt").symlink_to(source / "copy.txt")
    read = {path.name for path in dense.iterdir()} - {"config.json", "model.safetensors"}
    assert set(described(source)) == read | {"copy.txt", "again.txt"}
