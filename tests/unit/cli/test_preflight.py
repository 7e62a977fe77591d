"""A teacher may have padding rows that the student lacks, as Qwen2.5-7B has beside 0.5B."""

from pathlib import Path
from typing import Any

import pytest

from megatron_opd.cli.preflight import check_models
from megatron_opd.config.schema import Config
from tests.support.cli_cases import call, refused
from tests.support.models import tiny_qwen3, tiny_qwen3_moe, write_tokenizer


def with_teacher(tmp_path: Path, config: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The configuration with a teacher of so many ids and the student's tokenizer."""
    teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=vocab_size)
    write_tokenizer(teacher, 512)
    return config | {"teacher": {"model": str(teacher)}}


def test_padding_rows_of_a_teacher_are_allowed(tmp_path: Path, config: dict[str, Any]):
    """Before: student.model and teacher.model must have the same vocab_size, got 512 and 544."""
    tree = with_teacher(tmp_path, config, 544)
    assert call(tmp_path, tree, verb="check") == 0
    models = check_models(Config.model_validate(tree)).models
    assert {role: facts.vocab_size for role, facts in models.items()} == {
        "student": 512,
        "teacher": 544,
    }


def test_a_teacher_that_cannot_score_every_id_is_refused(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    tree = with_teacher(tmp_path, config, 480)
    capsys.readouterr()  # of the library that wrote the models
    words = ("teacher.model", "at least student.model's 512", "got 480", "pad its embedding")
    refused(capsys, call(tmp_path, tree, verb="check"), *words)


def test_ids_that_text_uses_are_no_padding(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    tree = with_teacher(tmp_path, config, 544)
    student = tiny_qwen3_moe(tmp_path / "student")
    for model in (student, tmp_path / "teacher"):
        write_tokenizer(model, 540)
    tree["student"] = {"model": str(student)}
    capsys.readouterr()  # of the library that wrote the models
    words = ("teacher.model", "vocab_size 512", "uses id 539", "pad the student's embedding to 544")
    refused(capsys, call(tmp_path, tree, verb="check"), *words)


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize("fields", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_dense_layers_of_a_mixture_are_refused_for_they_would_be_served_wrong(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], role: str, fields
):
    """Before: SGLang served them with experts that no checkpoint had filled."""
    config[role]["model"] = str(tiny_qwen3_moe(tmp_path / "mixed", **fields))
    capsys.readouterr()  # of writing the model
    dense = 1 if "mlp_only_layers" in fields else 0
    words = [f"{role}.model must have experts in every layer", f"layer {dense} of config.json"]
    for verb in ("check", "run"):
        refused(capsys, call(tmp_path, config, verb=verb), *words)
