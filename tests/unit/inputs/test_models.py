"""Student or teacher may have more padding rows, as Qwen2.5-7B has beside 0.5B."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.data.end_tokens import EndTokens
from megatron_opd.errors import UserError
from megatron_opd.fleet.startup import ServedModel, check_served
from megatron_opd.inputs.model_facts import read_model
from megatron_opd.inputs.models import check_latent, check_models, longest_row, read_models
from megatron_opd.launch.servers import make_spec
from sglang_bridge.protocol import ServerEnds, ServerInfo
from sglang_bridge.server.spec import NUM_IDS_VARIABLE, server_env
from tests.support.cli_cases import call, refused
from tests.support.latent_models import tiny_deepseek_v3
from tests.support.models import (
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_mistral,
    tiny_mixtral,
    tiny_olmo2,
    tiny_phi3,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_smollm3,
    write_tokenizer,
)


@pytest.mark.parametrize(
    ("limits", "row"),
    [
        ({"max_turns": 2, "max_tokens": 90}, (66, 24)),
        ({"max_turns": 20, "max_tokens": 90}, (1, 89)),
        ({"max_turns": 20, "max_tokens": 90, "max_sampled_tokens": 30}, (60, 30)),
        ({"max_turns": 9, "max_tokens": 90, "history": "branch", "max_sequences": 4}, (1, 89)),
    ],
)
def test_the_longest_row_of_an_environment_is_one_sequence(
    config: dict[str, Any], limits: dict[str, Any], row: tuple[int, int]
):
    environment = {"environment": {"type": "guess", **limits}}
    data = {"data": config["data"] | {"chat_template": True}}
    rollout = {"rollout": {"max_new_tokens": 12}}
    tree = Config.model_validate(config | data | rollout | environment)
    assert longest_row(tree, read_models(tree).student) == row


def with_teacher(tmp_path: Path, config: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The configuration with a teacher of so many ids and the student's tokenizer."""
    teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=vocab_size)
    write_tokenizer(teacher, 512)
    return config | {"teacher": {"model": str(teacher)}}


def test_padding_rows_of_a_teacher_are_allowed(tmp_path: Path, config: dict[str, Any]):
    """Before: student.model and teacher.model must have the same vocab_size, got 512 and 544."""
    tree = with_teacher(tmp_path, config, 544)
    assert call(tmp_path, tree, verb="check") == 0
    models = check_models(Config.model_validate(tree)).models.served
    assert {role: facts.vocab_size for role, facts in models.items()} == {
        "student": 512,
        "teacher": 544,
    }


def with_student(tmp_path: Path, config: dict[str, Any], rows: int, tokens: int) -> dict[str, Any]:
    """The configuration with a student of so many ids, of which text uses the first `tokens`."""
    student = tiny_qwen3(tmp_path / "student", vocab_size=rows)
    write_tokenizer(student, tokens)
    return config | {"student": {"model": str(student)}}


def test_padding_rows_of_a_student_are_cut(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    """Before: refused, teacher.model must have a vocab_size of at least student.model's 576."""
    tree = with_student(tmp_path, config, 576, 512)
    capsys.readouterr()  # of the library that wrote the models
    assert call(tmp_path, tree, verb="check") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "student.model has 576 rows in its vocabulary, a teacher only 512: ids from 512" in said
    parsed = Config.model_validate(tree)
    student = check_models(parsed).student
    assert (student.vocab_size, student.spec.vocab_size) == (512, 576)
    server = make_spec(parsed, "student", 1, 0, student.path)
    assert server_env(server, {})[NUM_IDS_VARIABLE] == "512"
    assert NUM_IDS_VARIABLE not in server_env(make_spec(parsed, "teacher", 1, 0, student.path), {})


def test_an_evaluation_without_teachers_samples_the_same_ids(
    tmp_path: Path, config: dict[str, Any]
):
    parsed = Config.model_validate(with_student(tmp_path, config, 576, 512))
    assert check_models(parsed, teachers=False).student.vocab_size == 512


def test_a_teacher_that_cannot_score_every_token_is_refused(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    tree = with_student(tmp_path, with_teacher(tmp_path, config, 512), 576, 520)
    write_tokenizer(tmp_path / "teacher", 520)
    capsys.readouterr()  # of the library that wrote the models
    words = ("a teacher's vocab_size 512", "uses id 519", "pad the teacher's embedding", "576")
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
    dense, (key,) = 1 if "mlp_only_layers" in fields else 0, fields
    words = [f"{role}.model must have experts in every layer", f"layer {dense} of config.json"]
    if role == "teacher":
        words = ["teacher.model: ", f"config.json: {key} must be null or "]
    for verb in ("check", "run"):
        refused(capsys, call(tmp_path, config, verb=verb), *words)


def test_what_servers_lack_for_latent_attention_is_refused(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    student = {"model": str(tiny_deepseek_v3(tmp_path / "student", seed=3))}
    teacher = {"teacher": {"model": str(tiny_deepseek_v3(tmp_path / "teacher", seed=4))}}
    capsys.readouterr()
    assert call(tmp_path, config | teacher | {"student": student}, verb="check") == 0
    capsys.readouterr()
    tree = config | teacher | {"student": student | {"quantization": "int8"}}
    tree |= {"weight_sync": {"type": "shards"}}
    words = "student.quantization must be null with latent attention", "got int8"
    refused(capsys, call(tmp_path, tree, verb="check"), *words)
    parsed = Config.model_validate(config | teacher | {"student": student})
    run = parsed.run.model_copy(update={"deterministic": True})
    parsed = parsed.model_copy(update={"run": run})
    with pytest.raises(UserError, match=r"^run\.deterministic must be false with latent attention"):
        check_latent(parsed, read_models(parsed))


@pytest.mark.parametrize(
    ("write", "fields", "words"),
    [
        (tiny_qwen3_moe, {"tie_word_embeddings": True}, ["tie_word_embeddings must be false"]),
        (tiny_mixtral, {"tie_word_embeddings": True}, ["tie_word_embeddings must be false"]),
        (tiny_mixtral, {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["got linear"]),
        (tiny_mixtral, {"rope_theta": 500.5, "rope_parameters": None}, ["got 500.5"]),
        (tiny_mixtral, {"head_dim": 32}, ["head_dim must be hidden_size", "got 32"]),
        (tiny_qwen3, {"architectures": ["Qwen2ForCausalLM"]}, ["architectures must be", "SGLang"]),
    ],
)
def test_what_sglang_reads_otherwise_is_refused(
    write: Any, fields: dict[str, Any], words: list[str], tmp_path: Path
):
    """Before: accepted, and the servers held another model than the learner's."""
    path = write(tmp_path / "model")
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(described | fields))
    with pytest.raises(UserError) as caught:
        read_model(path, "student.model")
    for word in ["student.model", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("write", "fields"),
    [
        (tiny_mistral, {"sliding_window": 1024}),
        (tiny_phi3, {"sliding_window": 1024}),
        (tiny_qwen3, {"sliding_window": 1024, "use_sliding_window": True}),
    ],
)
def test_no_context_passes_a_window_that_sglang_ignores(
    write: Any, fields: dict[str, Any], tmp_path: Path, config: dict[str, Any], capsys
):
    model = write(tmp_path / "windowed", **fields)
    config["student"]["model"] = str(model)
    rule = "sliding_window must be null or at least student.context_length"
    capsys.readouterr()  # of writing the model
    for limit in (None, 1025):
        config["student"]["context_length"] = limit
        refused(capsys, call(tmp_path, config, verb="check"), rule, f"1024 and {limit or 2048}")
    config["student"]["context_length"] = 1024
    assert call(tmp_path, config, verb="check") == 0
    # and no server elsewhere takes more
    parsed = Config.model_validate(config)
    elsewhere = served(tmp_path / "nowhere", 1025)
    spec, ends = read_model(model, "student.model").spec, EndTokens((1,), 1)
    trained = ServedModel(512, ends, spec)
    with pytest.raises(UserError, match="start http://there with --context-length 1024"):
        check_served("student", elsewhere, parsed.student, trained, deterministic=False)
    assert spec.longest_context == 1024


def served(model: Path, context: int) -> ServerInfo:
    return ServerInfo(
        url="http://there",
        model_path=str(model),
        vocab_size=512,
        context_length=context,
        tp_size=1,
        ep_size=1,
        version=0,
        dtype="bfloat16",
        max_total_tokens=1,
        deterministic=False,
        ends=ServerEnds((1,), (1,)),
    )


@pytest.mark.parametrize(
    ("write", "fields", "words"),
    [
        (tiny_olmo2, {"tp": 4}, ("student.tp must be <= the model's key-value", "got tp=4 and 2")),
        (tiny_gemma3, {"tp": 4}, ("student.tp must be <= the model's key-value", "gemma3_text")),
        (tiny_smollm3, {"tp": 4}, ("student.tp must be <= the model's key-value", "smollm3")),
        (tiny_smollm3, {"quantization": "int8"}, ("student.quantization must be null", "smollm3")),
    ],
)
def test_how_sglang_cannot_serve_a_family(
    write: Any, fields: dict[str, Any], words: tuple[str, ...], tmp_path: Path, config, capsys
):
    config["student"] |= {"model": str(write(tmp_path / "model")), **fields}
    capsys.readouterr()  # of writing the model
    refused(capsys, call(tmp_path, config, verb="check"), *words)


def test_experts_with_biases_are_served_as_they_are(tmp_path: Path, config: dict[str, Any], capsys):
    config["teacher"] |= {"model": str(tiny_gpt_oss(tmp_path / "model"))}
    capsys.readouterr()
    assert call(tmp_path, config, verb="check") == 0
    config["teacher"] |= {"quantization": "int8"}
    capsys.readouterr()
    words = "teacher.quantization must be null in a gpt-oss model", "got int8"
    refused(capsys, call(tmp_path, config, verb="check"), *words)


def test_rotary_settings_in_two_places_are_named(tmp_path: Path, config: dict[str, Any], capsys):
    model = tiny_qwen3(tmp_path / "added")
    described = json.loads((model / "config.json").read_text())
    described["rope_parameters"]["rope_theta"] = 500.0
    described["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    (model / "config.json").write_text(json.dumps(described))
    config["teacher"]["model"] = str(model)
    capsys.readouterr()
    assert call(tmp_path, config, verb="check") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "teacher.model: rope_scaling {'rope_type': 'linear', 'factor': 4.0} replaces" in said
