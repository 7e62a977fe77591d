"""`opd check` reads what a run will read; what is wrong in it is one line and exit code 2."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatron_opd.cli.main import main
from megatron_opd.config.schema import Config
from megatron_opd.inputs import prepare
from tests.support.cli_cases import call, refused


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without the line breaks and blanks of its tables."""
    return "".join(capsys.readouterr().out.split())


def squeezed(text: str) -> str:
    return "".join(text.split())


def student_copy(tmp_path: Path, models: Path, config: dict) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(models / "student", copy)
    config["student"]["model"] = str(copy)
    return copy


@pytest.mark.parametrize("verb", ["check", "run"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train=/nowhere.jsonl", ["data file not found: /nowhere.jsonl"]),
        ("data.task=poetry", ["unknown task 'poetry'", "arithmetic, code, exact"]),
        ("evaluation.problems=8", ["data.heldout must be a file"]),
        ("evaluation.problems=8 data.heldout=/no.jsonl", ["data file not found: /no.jsonl"]),
        ("evaluation.problems=8 data.heldout=/no.jsonl data.task=none", ["'none' has no verifier"]),
        ("data.prompt_key=question", ["missing column 'question'", "'answer', 'prompt'"]),
        ("data.chat_template=true", ["tokenizer has no chat template"]),
        ("data.teacher_key=who", ["missing column 'who'"]),
        ("data.answer_key=prompt", ["answer_key", "different columns", "'prompt', 'prompt'"]),
        (
            "data.stop_key=ends",
            ["data.stop_key must name a column", "got 'ends', which no row has"],
        ),
        ("data.max_new_tokens_key=most", ["data.max_new_tokens_key", "'most', which no row has"]),
        ("data.epochs=1", ["prompts for 1 responses", "data.epochs 1", "buffer.batch_size is 64"]),
        ("data.system_prompt=x", ["system_prompt needs chat_template: true", "got 'x'"]),
        ("data.train=/tmp", ["/tmp"]),
        ("data.answer_key=gold objective.type=reinforce", ["1 of 1 rows", "no answer", "'gold'"]),
        # types and ranges
        ("run.max_steps=true", ["run.max_steps", "valid integer", "got True"]),
        ("run.max_steps='5'", ["run.max_steps", "valid integer", "got '5'"]),
        ("run.max_steps=1e20", ["run.max_steps", "valid integer", "got 1e+20"]),
        ("run.max_steps=100000000000", ["run.max_steps", "less than or equal to 2147483647"]),
        ("run.max_steps=5.0", ["run.max_steps", "valid integer", "got 5.0"]),
        ("student.servers=1:30", ["student.servers", "valid integer", "got '1:30'"]),
        ("student.servers=010", ["student.servers", "valid integer", "got '010'"]),
        ("data.shuffle=1", ["data.shuffle", "valid boolean", "got 1"]),
        ("data.train=5", ["data.train", "got 5"]),
        ("student.host=5", ["student.host", "valid string", "got 5"]),
        ("rollout.temperature=1e-300", ["rollout.temperature", "0.01", "got 1e-300"]),
        ("rollout.temperature=1e20", ["rollout.temperature", "100", "got 1e+20"]),
        ("scoring.temperature=0.001", ["scoring.temperature", "0.01", "got 0.001"]),
        ("evaluation.temperature=1e-9", ["evaluation.temperature", "got 1e-09"]),
        ("learner.timeout_s=1e20", ["learner.timeout_s", "2000000", "got 1e+20"]),
        ("learner.optimizer.lr=3", ["learner.optimizer.lr", "less than or equal to 1", "got 3"]),
        ("student.servers=2000000000", ["student.servers", "65536"]),
        ("learner.optimizer.warmup_steps=101", ["warmup_steps", "run.max_steps", "got 101"]),
        ("rollout={temperature: 1, temperature: 2}", ["'temperature' is given twice"]),
        ("data.train={a: 1, a: 2}", ["'a' is given twice"]),
        # places and addresses
        ("run.dir=''", ["run.dir", "must name a file or directory", "got ''"]),
        ('run.dir="\\x20"', ["run.dir", "must name a file or directory", "got ' '"]),
        ("student.model=''", ["student.model", "must name a file or directory"]),
        ("run.dir=/", ["student.model must lie outside run.dir /"]),
        ("run.dir=/usr", ["run.dir /usr holds files that are not a run's", "choose a directory"]),
        ("run.dir=/etc/passwd/x", ["run.dir must be a directory", "/etc/passwd is a file"]),
        (f"run.dir={'x/' * 2500}", ["run.dir", "at most 4095 bytes"]),
        ("student.host=''", ["student.host", "host name or an IPv4 address", "got ''"]),
        ('teacher.host="\\x20"', ["teacher.host", "host name or an IPv4 address", "got ' '"]),
        ('student.host="a\\x20b"', ["student.host", "got 'a b'", "leave out scheme, port"]),
        ("weight_sync.host=http://x", ["weight_sync.host", "got 'http://x'"]),
        ("learner.listen_host=host:80", ["learner.listen_host", "got 'host:80'"]),
        ("student.host=256.1.1.1", ["student.host", "got '256.1.1.1'"]),
        ("student.host=1.2.3", ["student.host", "got '1.2.3'"]),
        ("student.host=-x", ["student.host", "got '-x'"]),
        ("student.urls=['http://a;b:1']", ["student.urls", "http(s)://HOST:PORT", "a;b"]),
    ],
)
def test_check_and_run_refuse_alike(
    tmp_path: Path,
    config: dict,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    override: str,
    words,
):
    options = [word for one in override.split(" ") for word in ("--set", one)]
    if "{" in override:
        options = ["--set", override]
    refused(capsys, call(tmp_path, config, *options, verb=verb), *words)
    assert not (tmp_path / "run").exists()


def test_a_place_without_permission(
    tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str], monkeypatch
):
    """As root every place allows everything, so the answer is made up."""
    asked: list[Path] = []

    def access(path: Path, mode: int) -> bool:
        asked.append(path)
        return mode != os.W_OK | os.X_OK

    monkeypatch.setattr(os, "access", access)
    config["run"]["dir"] = str(tmp_path / "not" / "there")
    words = (f"run.dir {tmp_path}/not/there cannot be written", f"{tmp_path} does not allow it")
    refused(capsys, call(tmp_path, config, verb="check"), *words)
    assert tmp_path in asked


def test_an_earlier_run_is_no_fault_of_a_plan(tmp_path: Path, config: dict):
    """What becomes of it is an option of `opd run`."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.resolved.yaml").write_text("")
    assert call(tmp_path, config, verb="check") == 0


@pytest.mark.parametrize("verb", ["check", "run"])
@pytest.mark.parametrize(
    "text", ["a: " + "[" * 20_000, "{a: " * 20_000, "\n".join(" " * i + "a:" for i in range(2000))]
)
def test_deep_yaml_is_one_line(tmp_path: Path, capsys, text: str, verb: str):
    (tmp_path / "deep.yaml").write_text(text)
    code = main([verb, str(tmp_path / "deep.yaml")])
    refused(capsys, code, "deep.yaml is nested too deeply")


@pytest.mark.parametrize("verb", ["check", "run"])
def test_a_missing_tokenizer_is_called_so(
    tmp_path: Path, config: dict, models: Path, capsys: pytest.CaptureFixture[str], verb: str
):
    copy = student_copy(tmp_path, models, config)
    (copy / "tokenizer.json").unlink()
    refused(capsys, call(tmp_path, config, verb=verb), "student.model", "has no tokenizer")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": "2"}, ["num_hidden_layers must be an integer", "got '2'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers must be an integer", "got True"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "<= 1024"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads must divide num_attention_heads"]),
        ({"head_dim": 7}, ["head_dim must be an even number"]),
        ({"rms_norm_eps": "x"}, ["rms_norm_eps must be a number"]),
        ({"rope_parameters": [1]}, ["rope_parameters must be a mapping"]),
        ({"num_experts_per_tok": 5}, ["num_experts_per_tok must be <= num_", "got 5 and 4"]),
        ({"layer_types": ["x", "y"]}, ["layer_types must name full_attention alone"]),
        ({"attention_dropout": "x"}, ["transformers refuses", "config.json"]),
        ({"eos_token_id": 512}, ["eos_token_id", "vocab_size 512", "got 512"]),
    ],
)
def test_a_bad_config_json_is_not_called_a_bad_tokenizer(
    tmp_path: Path, config: dict, models: Path, capsys, fields: dict, words: list[str]
):
    copy = student_copy(tmp_path, models, config)
    described = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(described | fields))
    refused(capsys, call(tmp_path, config, verb="check"), "student.model", *words)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", ["TemplateSyntaxError"]),
        ("{{ messages.__class__.__mro__ }}", ["SecurityError"]),
        ("{{ raise_exception('system role missing') }}", ["TemplateError: system role missing"]),
        ("always the same", ["renders every prompt alike"]),
    ],
)
def test_a_broken_chat_template_is_found_by_check(
    tmp_path: Path, config: dict, models: Path, capsys, template: str, words: list[str]
):
    copy = student_copy(tmp_path, models, config)
    (copy / "chat_template.jinja").write_text(template)
    config["data"]["chat_template"] = True
    refused(capsys, call(tmp_path, config, verb="check"), "data.chat_template", *words)


def test_check_reads_the_first_rows_and_with_data_all_of_them(
    tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]
):
    train = Path(config["data"]["train"])
    rows = ['{"prompt": "1+1=", "answer": "2"}\n'] * 300
    train.write_text("".join(rows))
    assert call(tmp_path, config, verb="check") == 0
    text = printed(capsys)
    assert (
        squeezed(f"{train}: the first 64 rows read, 0 to be skipped; longest prompt 4 tokens")
        in text
    )
    assert (
        squeezed("not checked further rows and the numbers in the weights: opd check --data")
        in text
    )
    rows[100] = '{"prompt": "", "answer": "2"}\n'
    rows[200] = json.dumps({"prompt": "+" * 1025, "answer": "2"}) + "\n"
    train.write_text("".join(rows))
    assert call(tmp_path, config, verb="check") == 0
    assert squeezed("0 to be skipped") in printed(capsys)
    assert call(tmp_path, config, "--data", verb="check") == 0
    text = printed(capsys)
    assert (
        squeezed(f"{train}: all 300 rows read, 2 to be skipped; longest prompt 1025 tokens") in text
    )
    assert squeezed(f"1 empty, first {train}:101: 'prompt' is empty") in text
    assert squeezed(f"1 too long, first {train}:201: 1025 tokens, the limit is 1024") in text
    rows[100:110] = [rows[100]] * 10
    train.write_text("".join(rows))
    code = call(tmp_path, config, "--data", verb="check")
    refused(capsys, code, "10 of 300 rows", "data.max_bad_fraction", f"first {train}:101")


def test_check_judges_a_sample_of_a_large_file_and_with_data_all_of_it(
    tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str], monkeypatch
):
    monkeypatch.setattr(prepare, "WHOLE_BYTES", 1000)
    train = Path(config["data"]["train"])
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": "2"}) + "\n" for n in range(3000)]
    rows[2000] = '{"prompt": "", "answer": "2"}\n'
    train.write_text("".join(rows))
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join(rows[1000:1990]))
    config["data"]["heldout"] = str(heldout)
    config["evaluation"] = {"problems": 8}
    config["data"]["max_new_tokens_key"] = "most"
    assert call(tmp_path, config, verb="check") == 0
    text = printed(capsys)
    judged = re.search(r"(\d+)of3000rowsread", text)
    assert judged is not None
    assert int(judged[1]) in (256, 257)
    assert squeezed("GB of rows are read when they are drawn") in text
    assert squeezed(f"{judged[1]} of 3000 rows were judged, opd check --data judges all") in text
    said = f"data.max_new_tokens_key: none of the {judged[1]} rows read so far has 'most'"
    assert squeezed(said) in text
    assert squeezed(f"{heldout}: the first 64 rows read") in text
    assert call(tmp_path, config, "--data", verb="check") == 2
    words = "data.max_new_tokens_key must name a column of data.train, got 'most', which no row has"
    refused(capsys, 2, words)
    del config["data"]["max_new_tokens_key"]
    assert call(tmp_path, config, "--data", verb="check") == 0
    text = printed(capsys)
    assert squeezed(f"{train}: all 3000 rows read, 1 to be skipped") in text
    assert squeezed(f"1 empty, first {train}:2001: 'prompt' is empty") in text
    assert squeezed("prompts of data.heldout") in text
    assert squeezed(f"are in data.train {train} too") in text
    assert squeezed(f"{heldout}: all 990 rows read, 0 to be skipped") in text


def test_a_run_reads_as_many_problems_of_a_large_file_as_it_needs(
    tmp_path: Path, config: dict, monkeypatch
):
    monkeypatch.setattr(prepare, "WHOLE_BYTES", 1000)
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": "2"}) + "\n" for n in range(600)]
    (tmp_path / "heldout.jsonl").write_text("".join(lines))
    config["data"]["heldout"] = str(tmp_path / "heldout.jsonl")
    config["evaluation"] = {"problems": 8}
    made = Config.model_validate(config)
    inputs = prepare.read_inputs(made)
    (found,) = inputs.heldout.values()
    assert [prompt.text for prompt in found.examples] == [f"{n}+1=" for n in range(8)]
    assert found.tally.rows == 256
    assert [each.drawn for each in inputs.train] == [None]
    kept = prepare.read_train(made, inputs.checked, prepare.HowRead(by_row=True))
    assert [each.drawn is None for each in kept] == [False]
    monkeypatch.setattr(prepare, "WHOLE_BYTES", 1)
    assert [each.drawn is None for each in prepare.read_train(made, inputs.checked)] == [False]
    whole = prepare.read_train(made, inputs.checked, prepare.HowRead(by_row=False))
    assert [each.drawn for each in whole] == [None]


@pytest.mark.parametrize(("value", "what"), [(np.nan, "NaN"), (np.inf, "an infinity")])
def test_check_with_data_names_the_tensor_that_is_not_finite(
    tmp_path: Path, config: dict, models: Path, capsys, value: float, what: str
):
    copy = student_copy(tmp_path, models, config)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert call(tmp_path, config, verb="check") == 0
    capsys.readouterr()
    code = call(tmp_path, config, "--data", verb="check")
    refused(capsys, code, "student.model", f"model.norm.weight holds {what} at element 3")


def test_tensors_that_are_missing_or_that_nothing_reads_are_named(
    tmp_path: Path, config: dict, models: Path, capsys
):
    copy = student_copy(tmp_path, models, config)
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"v_head.weight": np.ones(3)}, copy / "model.safetensors")
    assert call(tmp_path, config, verb="check") == 0
    assert squeezed("1 tensor: v_head.weight, which nothing reads") in printed(capsys)
    lost = "model.layers.1.self_attn.k_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != lost}, copy / "model.safetensors")
    code = call(tmp_path, config, verb="check")
    refused(capsys, code, "student.model", f"lacks 1 tensor: {lost}")


def test_a_teacher_without_use_is_said(tmp_path: Path, config: dict, capsys):
    options = ["--set", "objective.type=grpo", "--set", "rollout.group_size=4"]
    assert call(tmp_path, config, *options, verb="check") == 0
    assert squeezed("note teacher has no effect: objective.type grpo reads no teacher") in printed(
        capsys
    )
    assert call(tmp_path, config, verb="check") == 0
    assert squeezed("has no effect") not in printed(capsys)


def test_an_overlap_that_no_batch_is_ready_for_is_said(tmp_path: Path, config: dict, capsys):
    options = ["--set", "weight_sync.overlap=true", "--set", "schedule.max_staleness=2"]
    held = ["--set", "schedule.hold_batches=2"]
    assert call(tmp_path, config, *options, *held, verb="check") == 0
    assert squeezed("note weight_sync.overlap has no effect: with schedule.max") in printed(capsys)
    assert call(tmp_path, config, *options, verb="check") == 0
    assert squeezed("has no effect") not in printed(capsys)


def test_a_combination_that_was_seen_to_fail_is_warned_of(tmp_path: Path, config: dict, capsys):
    config["data"]["task"] = "arithmetic"
    grpo = ["--set", "objective.type=grpo", "--set", "rollout.group_size=4"]
    grpo += ["--set", "buffer.batch_size=8"]
    rounded = ["--set", "weight_sync.round_to=int8"]
    whole = ["--set", "correction.type=importance"]
    said = squeezed("note correction: grpo with the whole ratio of learner to sampler is PPO-IS")
    for options, warned in (
        ([*grpo, *rounded], False),
        ([*grpo, *rounded, *whole], True),
        ([*grpo], False),
        ([*grpo, *rounded, "--set", "correction={type: truncated, prox: true}"], False),
        ([*grpo, *rounded, *whole, "--set", "correction.prox=true"], False),
        (rounded, False),
    ):
        assert call(tmp_path, config, *options, verb="check") == 0
        assert (said in printed(capsys)) is warned, options


def test_held_out_problems_that_are_trained_on_are_said(tmp_path: Path, config: dict, capsys):
    config["data"]["heldout"] = config["data"]["train"]
    options = ["--set", "evaluation.problems=1"]
    assert call(tmp_path, config, *options, verb="check") == 0
    assert squeezed("note 1 of 1 prompts of data.heldout") in printed(capsys)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "2+2=", "answer": "4"}\n')
    config["data"]["heldout"] = str(other)
    assert call(tmp_path, config, *options, verb="check") == 0
    assert squeezed("prompts of data.heldout") not in printed(capsys)


def test_held_out_sets_are_named_by_their_keys(tmp_path: Path, config: dict, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "2+2=", "answer": "4"}\n')
    config["data"]["heldout"] = {"seen": config["data"]["train"], "new": str(other)}
    options = ["--set", "evaluation={problems: 1, every: 2}"]
    assert call(tmp_path, config, *options, verb="check") == 0
    said = printed(capsys)
    assert squeezed("note 1 of 1 prompts of data.heldout.seen") in said
    assert squeezed(f"data.heldout.new {other}: all 1 rows read") in said
    for key, value, words in (
        ("data.heldout.gone", "/no.jsonl", ["data.heldout.gone", "not found: /no.jsonl"]),
        (
            "data.heldout.new.max_new_tokens",
            "99999",
            ["data.heldout.new.max_new_tokens must be < the student's context", "99999"],
        ),
    ):
        config["data"]["heldout"]["new"] = {"file": str(other)}
        code = call(tmp_path, config, *options, "--set", f"{key}={value}", verb="check")
        refused(capsys, code, *words)


def test_a_trust_region_without_use_is_said(tmp_path: Path, config: dict, capsys):
    options = ["--set", "objective.type=grpo", "--set", "rollout.group_size=4"]
    options += ["--set", "correction={type: truncated, prox: true}"]
    assert call(tmp_path, config, *options, verb="check") == 0
    assert squeezed("note objective.trust never acts: with correction.prox") in printed(capsys)


def test_a_plan_says_what_was_not_here(tmp_path: Path, config: dict, models: Path, capsys):
    copy = student_copy(tmp_path, models, config)
    (copy / "model.safetensors").unlink()
    assert call(tmp_path, config, verb="check") == 0
    text = printed(capsys)
    assert squeezed(f"not checked student.model {copy}: weights not here; opd run needs it") in text
    assert squeezed("longest prompt 4 tokens") in text, "its tokenizer is here and is used"
    config["data"]["train"] = "elsewhere.jsonl"
    assert call(tmp_path, config, verb="check") == 0
    assert squeezed("not checked data.train elsewhere.jsonl: not here") in printed(capsys)
    refused(capsys, call(tmp_path, config, "--data", verb="check"), "not found: elsewhere.jsonl")
    refused(
        capsys, call(tmp_path, config, verb="run"), "student.model", "neither model.safetensors"
    )


def test_columns_that_no_key_names_are_told(tmp_path: Path, config: dict, capsys):
    """Before: a system message in a column of its own was left out in silence."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "answer": "2", "system": "Be brief."}) + "\n")
    config["data"]["train"] = str(rows)
    assert call(tmp_path, config, verb="check") == 0
    found = " ".join(capsys.readouterr().out.split())
    assert "not read " in found
    assert "rows.jsonl: 'system'" in found


def test_a_path_with_brackets_is_printed_as_it_is(tmp_path: Path, config: dict, capsys):
    config["run"]["dir"] = "runs/[bold]x[/red]"
    assert call(tmp_path, config, verb="check") == 0
    assert squeezed("runs/[bold]x[/red]") in printed(capsys)


def test_a_path_with_a_nul_character_is_refused(tmp_path: Path, config: dict, capsys):
    config["run"]["dir"] = "a\0b"
    refused(capsys, call(tmp_path, config, verb="run"), "run.dir", "NUL")
    assert os.listdir(tmp_path)


def test_held_quantised_and_rounded_are_said_apart(tmp_path: Path, config: dict, capsys):
    """Which servers save memory, and which only sample from rounded values."""
    assert call(tmp_path, config, "--set", "student.quantization=int8", verb="check") == 0
    said = printed(capsys)
    assert squeezed("bfloat16, matrices held as int8") in said
    assert "notquantised" in said
    assert call(tmp_path, config, "--set", "weight_sync.round_to=int8", verb="check") == 0
    said = printed(capsys)
    assert squeezed("bfloat16, matrices rounded to int8 but held in bfloat16") in said
    assert "notquantised" not in said
