"""What is given as a model and is none, or is two: `opd check` says what `opd run` would."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.cli_cases import call, refused
from tests.support.models import tiny_qwen3

SINGLE = "model.safetensors"


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], Any], name: str = SINGLE) -> None:
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file(tensors, path / name, metadata={"format": "pt"})


def set_config(path: Path, **fields: object) -> None:
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(described | fields))


def as_float8(path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit(path, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))


def as_float64(path: Path) -> None:
    edit(path, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].double()}))


def only_pickles(path: Path) -> None:
    torch.save(load_file(path / SINGLE), path / "pytorch_model.bin")
    (path / SINGLE).unlink()


def adapter(path: Path) -> None:
    (path / "adapter_config.json").write_text("{}")


def pointer_of_weights(path: Path) -> None:
    (path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def pointer_of_config(path: Path) -> None:
    (path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")


def pointer_named(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")

    damage.__name__ = name
    return damage


def flax(path: Path) -> None:
    (path / SINGLE).rename(path / "flax_model.msgpack")


def megatron_root(path: Path) -> None:
    shutil.rmtree(path)
    (path / "iter_0000010").mkdir(parents=True)
    (path / "latest_checkpointed_iteration.txt").write_text("10")


def legacy(path: Path) -> None:
    shutil.rmtree(path)
    (path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (path / "latest_checkpointed_iteration.txt").write_text("10")


def other_single_beside_index(path: Path) -> None:
    names = list(load_file(path / SINGLE))
    shutil.copy(path / SINGLE, path / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    edit(path, lambda t: t["model.norm.weight"].mul_(2))


def other_file_without_index(path: Path) -> None:
    edit(path, lambda t: t["model.norm.weight"].mul_(2), "extra.safetensors")


def tied_with_other_head(path: Path) -> None:
    set_config(path, tie_word_embeddings=True)


CASES: tuple[tuple[Callable[[Path], None], tuple[str, ...]], ...] = (
    (adapter, ("LoRA adapter", "merge_and_unload")),
    (pointer_of_weights, (SINGLE, "git-LFS pointer", "git lfs pull")),
    (pointer_of_config, ("config.json", "git-LFS pointer")),
    *(
        (pointer_named(name), (name, "git-LFS pointer", "git lfs pull"))
        for name in (
            *("tokenizer.json", "tokenizer_config.json", "generation_config.json"),
            *("chat_template.jinja", "model.safetensors.index.json"),
        )
    ),
    (flax, ("flax_model.msgpack, not as safetensors",)),
    (megatron_root, ("Megatron checkpoint", "opd convert megatron-to-hf", "iter_0000010")),
    (legacy, ("legacy Megatron checkpoint", "mp_rank_00")),
    (only_pickles, ("pytorch_model.bin", "save_pretrained")),
    (other_single_beside_index, ("two models", SINGLE, "model-00001-of-00001.safetensors")),
    (other_file_without_index, ("two models", "extra.safetensors", "SGLang reads")),
    (tied_with_other_head, ("lm_head.weight must equal", "set tie_word_embeddings to false")),
)
UNTRAINABLE = (
    (as_float8, ("must be of dtype F32, BF16, F16, got F8_E4M3",)),
    (as_float64, ("model.norm.weight must be of dtype F32, BF16, F16, got F64",)),
)


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize(("damage", "words"), CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_check_and_run_refuse_in_the_same_words(
    damage: Callable[[Path], None],
    words: tuple[str, ...],
    role: str,
    tmp_path: Path,
    config: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
):
    config[role]["model"] = str(tiny_qwen3(tmp_path / "damaged"))
    damage(tmp_path / "damaged")
    capsys.readouterr()
    for verb in ("check", "run"):
        refused(capsys, call(tmp_path, config, verb=verb), f"{role}.model", *words)


@pytest.mark.parametrize(("damage", "words"), UNTRAINABLE)
def test_what_no_learner_takes_is_no_student(
    damage: Callable[[Path], None],
    words: tuple[str, ...],
    tmp_path: Path,
    config: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
):
    """Before: `opd check` accepted it, and the learner ended."""
    config["student"]["model"] = str(tiny_qwen3(tmp_path / "damaged"))
    damage(tmp_path / "damaged")
    capsys.readouterr()
    for verb in ("check", "run"):
        refused(capsys, call(tmp_path, config, verb=verb), "student.model", *words)


def as_int8(path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit(path, lambda t: t.update({name: t[name].to(torch.int8)}))


@pytest.mark.parametrize("damage", [as_float8, as_int8])
def test_a_teacher_whose_scales_are_lost_is_refused(
    damage: Callable[[Path], None],
    tmp_path: Path,
    config: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
):
    """Before: its server took the numbers as they stand."""
    config["teacher"]["model"] = str(tiny_qwen3(tmp_path / "damaged"))
    damage(tmp_path / "damaged")
    capsys.readouterr()
    for verb in ("check", "run"):
        words = ("teacher.model", "up_proj.weight is quantised (", "no quantization_config")
        refused(capsys, call(tmp_path, config, verb=verb), *words)


def test_a_file_is_no_model_directory(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    file = tiny_qwen3(tmp_path / "model") / SINGLE
    config["student"]["model"] = str(file)
    capsys.readouterr()
    refused(capsys, call(tmp_path, config, verb="check"), f"directory, got the file {file}")


def same_single_beside_index(path: Path) -> None:
    other_single_beside_index(path)
    edit(path, lambda t: t["model.norm.weight"].div_(2))


def tied_with_its_own_head(path: Path) -> None:
    set_config(path, tie_word_embeddings=True)
    edit(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))


@pytest.mark.parametrize("harmless", [same_single_beside_index, tied_with_its_own_head])
def test_two_copies_of_one_thing_are_accepted(
    harmless: Callable[[Path], None], tmp_path: Path, config: dict[str, Any]
):
    config["student"]["model"] = str(tiny_qwen3(tmp_path / "doubled"))
    harmless(tmp_path / "doubled")
    assert call(tmp_path, config, verb="check") == 0
