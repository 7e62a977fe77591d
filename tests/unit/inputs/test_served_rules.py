"""A teacher is what can be served rightly: by its architecture, its config.json and its files."""

import json
from pathlib import Path
from typing import Any

import pytest

from checks.students import failures
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.teacher import TeacherConfig
from megatron_opd.errors import UserError
from megatron_opd.inputs.model_facts import (
    ServedFacts,
    check_exact,
    read_model,
    read_served,
    read_teacher,
    trust_note,
)
from megatron_opd.inputs.models import check_models
from megatron_opd.inputs.served_rules import MEASURED, UNSERVED
from megatron_opd.models.families.table import FAMILIES
from megatron_opd.sizing.served import ModelSize
from megatron_opd.sizing.servers import server_memory
from tests.support.cli_cases import call, refused
from tests.support.delta_models import published_qwen3_5_moe
from tests.support.families import GLM4_MOE, LIMITED, MISSERVED, MISTRAL, SERVED, make
from tests.support.models import (
    tiny_llama,
    tiny_mixtral,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
    write_tokenizer,
)
from tests.support.paths import ROOT
from tests.support.students import STUDENTS

TRAINED = {
    "llama": tiny_llama,
    "mixtral": tiny_mixtral,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
}


def described(path: Path, **fields: object) -> Path:
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(said | fields))
    return path


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(MISTRAL, tmp_path_factory.mktemp("models") / "mistral")


def copy_of(model: Path, target: Path, **fields: object) -> Path:
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return described(target, **fields)


@pytest.mark.parametrize(
    ("family", "tied"),
    [*((family, False) for family in TRAINED), ("llama", True), ("qwen2", True), ("qwen3", True)],
)
def test_files_and_config_say_the_same_of_how_large_a_model_is(
    family: str, tied: bool, tmp_path: Path
):
    """A teacher's plan of memory and FLOPs is by its files, a student's by its config.json."""
    path = TRAINED[family](tmp_path / "model", tie_word_embeddings=tied)
    ours, theirs = read_model(path, "student.model").served, read_served(path, "teacher.model")
    assert figures(ours) == figures(theirs)
    for name in ("model.safetensors", "tokenizer.json"):
        (path / name).unlink()
    assert figures(read_served(path, "teacher.model")) == figures(theirs), "not here, planned alike"


def test_a_vision_tower_takes_no_memory_of_a_server(tmp_path: Path):
    path = published_qwen3_5_moe(tmp_path / "model")
    ours, theirs = read_model(path, "student.model").served, read_served(path, "teacher.model")
    assert ours.size.parameters == theirs.size.parameters
    assert ours.size.active_parameters == theirs.size.active_parameters


def figures(facts: ServedFacts) -> list[Any]:
    size = facts.size
    sections = [
        ServerConfig(model=facts.path, tp=tp, ep=ep, quantization=format, dtype=dtype)
        for tp, ep in ((1, 1), (2, 1), (2, 2), (4, 2))
        for format in (None, "int8")
        for dtype in ("bfloat16", "float32")
    ]
    counted = (size.parameters, size.active_parameters, size.active_layer_elements)
    heads = (size.num_heads, size.num_kv_heads, size.head_dim, size.ffn_size, size.num_experts)
    return [*counted, *heads, *(server_memory(size, section) for section in sections)]


def test_every_measured_architecture_is_in_the_record():
    record = json.loads((ROOT / "benchmarks/results/families.json").read_text())
    found = {(row["architecture"], row["rope"]) for row in record["served"] + record["limited"]}
    allowed = {(name, kind) for name, row in MEASURED.items() for kind in row.ropes}
    assert allowed <= found
    assert {family.architecture for family in FAMILIES.values()} <= {name for name, _ in found}
    assert record["failed"] == []
    assert {row["name"] for row in record["served"]} == set(SERVED)
    assert {row["name"] for row in record["misserved"]} == set(MISSERVED)


def test_every_family_of_students_is_in_the_record():
    record = json.loads((ROOT / "benchmarks/results/students.json").read_text())
    assert {row["name"] for row in record["students"]} == set(STUDENTS) == set(FAMILIES)
    for row in record["students"]:
        assert failures(row) == row["failed"] == [], row["name"]
        assert failures(row | {"logits": 1e-3, "still": row["distil"]})


def test_servers_of_every_family_of_students_compute_with_what_they_are_sent():
    record = json.loads((ROOT / "benchmarks/results/synced.json").read_text())
    assert {row["name"] for row in record["students"]} == set(STUDENTS)
    assert record["failed"] == []
    assert all(set(row["by_way"].values()) == {0.0} for row in record["students"])


@pytest.mark.parametrize("name", UNSERVED)
def test_what_cannot_be_served_is_refused_whatever_is_trusted(
    name: str, mistral: Path, tmp_path: Path
):
    path = copy_of(mistral, tmp_path / "model", architectures=[name])
    with pytest.raises(UserError) as caught:
        read_served(path, "teacher.model", "any")
    assert f"architecture {name} is refused: {UNSERVED[name]}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_nobody_compared_is_served_when_told_so(mistral: Path, tmp_path: Path):
    path = copy_of(mistral, tmp_path / "model", architectures=["CohereForCausalLM"])
    with pytest.raises(UserError, match=r"not among those .* set teacher\.trust: any"):
        read_served(path, "teacher.model")
    facts = read_served(path, "teacher.model", "any")
    note = trust_note("teacher.model", facts)
    assert note is not None
    assert "nobody compared scores of 'CohereForCausalLM'" in note
    assert trust_note("teacher.model", read_served(mistral, "teacher.model")) is None
    # not even then beyond a window, of which nobody knows whether SGLang has it
    described(path, sliding_window=32)
    facts = read_served(path, "teacher.model", "any")
    with pytest.raises(UserError, match=r"context_length must be <= 32"):
        check_exact("teacher", facts, TeacherConfig(model=path))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text_config": {}}, "has parts besides its language model"),
        ({"model_type": "llama"}, "only with model_type 'mistral'"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be an integer"),
        ({"rope_scaling": [1]}, "rope_scaling must be a mapping"),
        ({"rope_scaling": {"type": "yarn"}}, "original_max_position_embeddings of rope type yarn"),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}},
            "factor of rope type yarn must be a number",
        ),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping must be null"),
        ({"dual_chunk_attention_config": {}}, "dual_chunk_attention_config must be null"),
    ],
)
def test_a_config_that_both_sides_read_differently_is_refused(
    fields: dict[str, Any], words: str, mistral: Path, tmp_path: Path
):
    path = copy_of(mistral, tmp_path / "model", **fields)
    with pytest.raises(UserError) as caught:
        read_served(path, "teacher.model")
    assert words in str(caught.value)
    assert str(caught.value).startswith("teacher.model: ")


@pytest.mark.parametrize("name", MISSERVED)
def test_what_sglang_serves_wrongly_is_refused(name: str, tmp_path: Path):
    """By how much: benchmarks/results/families.json."""
    family, words = MISSERVED[name]
    with pytest.raises(UserError) as caught:
        read_served(make(family, tmp_path / "model"), "teacher.model")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", LIMITED)
def test_a_window_that_sglang_ignores_limits_the_context(name: str, tmp_path: Path):
    path = make(LIMITED[name], tmp_path / "model")
    facts = read_served(path, "teacher.model")
    assert facts.exact is not None
    limit = facts.exact.tokens
    check_exact("teacher", facts, TeacherConfig(model=path, context_length=limit))
    for context in (limit + 1, None):
        with pytest.raises(UserError, match=rf"^teacher\.context_length must be <= {limit}: "):
            check_exact("teacher", facts, TeacherConfig(model=path, context_length=context))


def test_a_teacher_of_another_family_is_checked_as_the_student_is(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    """Plans, tables and the end token included; no name of its tensors is known."""
    path = make(GLM4_MOE, tmp_path / "glm")
    config["teacher"] = {"model": str(path)}
    capsys.readouterr()
    assert call(tmp_path, config, verb="check") == 0
    said = capsys.readouterr().out
    assert "Glm4MoeForCausalLM" in said
    parsed = Config.model_validate(config)
    models = check_models(parsed).models
    assert models.teachers["teacher"].size == read_teacher(parsed, "teacher").size
    assert isinstance(models.served["student"].size, ModelSize)
    write_tokenizer(path, 500)  # another vocabulary
    refused(capsys, call(tmp_path, config, verb="check"), "teacher.model", "must share one")


def test_a_tokenizer_that_needs_code_is_refused(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], mistral: Path
):
    path = copy_of(mistral, tmp_path / "model")
    (path / "tokenizer.json").unlink()
    (path / "tiktoken.model").write_text("")
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    config["teacher"] = {"model": str(path)}
    capsys.readouterr()
    words = ("teacher.model", "needs code of its own", "convert it once", "tokenizer.json")
    refused(capsys, call(tmp_path, config, verb="check"), *words)
