"""Bad input: one line on stderr, exit code 2, no traceback, nothing started."""

import json
import shutil
import socket
from pathlib import Path

import pytest
import yaml

from megatron_opd.cli.main import main
from tests.models import tiny_qwen3, tiny_qwen3_moe, write_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_qwen3(root / "teacher")
    tiny_qwen3_moe(root / "student")
    return root


@pytest.fixture
def config(tmp_path: Path, models: Path) -> dict:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return {
        "run": {"dir": str(tmp_path / "run")},
        "data": {"train": str(tmp_path / "train.jsonl"), "task": "exact"},
        "student": {"model": str(models / "student")},
        "teacher": {"model": str(models / "teacher")},
        "rollout": {"max_new_tokens": 64},
        "evaluation": {"problems": 0},
    }


def call(tmp_path: Path, tree: dict, *arguments: str, verb: str = "run") -> int:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return main([verb, str(path), *arguments])


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> None:
    output = capsys.readouterr()
    assert code == 2
    lines = output.err.strip().splitlines()
    assert len(lines) == 1, output.err
    for word in words:
        assert word in lines[0]


def test_check_prints_the_plan(tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]):
    assert call(tmp_path, config, verb="check") == 0
    printed = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM" in printed
    assert "(1 + 1) * 64 = 128 permits" in printed


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.temperatur=1", ["unknown key 'rollout.temperatur'", "'rollout.temperature'"]),
        ("rollout.temperature=0", ["rollout.temperature", "0"]),
        ("support.m=65", ["support.m", "65"]),
        ("student.model=/nowhere", ["student.model", "/nowhere"]),
        ("teacher.model=/nowhere", ["teacher.model", "/nowhere"]),
        ("data.train=/nowhere.jsonl", ["/nowhere.jsonl"]),
        ("data.task=poetry", ["poetry", "arithmetic"]),
        ("evaluation.problems=8", ["data.heldout"]),
        ("rollout.max_new_tokens=100000", ["rollout.max_new_tokens", "2048", "100000"]),
        ("student.context_length=5000", ["student.context_length", "2048", "5000"]),
        ("data.chat_template=true", ["chat template"]),
        ("data.max_prompt_tokens=1", ["all 1 prompts", "limit of 1"]),
    ],
)
def test_refusals_of_single_keys(
    tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str], override: str, words: list
):
    refused(capsys, call(tmp_path, config, "--set", override), *words)
    assert not (tmp_path / "run").exists()


def test_data_files(tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]):
    train = Path(config["data"]["train"])
    train.write_text("")
    refused(capsys, call(tmp_path, config), str(train), "no rows")
    train.write_text('{"prompt": "a"}\n{"prompt": \n')
    refused(capsys, call(tmp_path, config), f"{train}:2")


def test_models_that_do_not_match(
    tmp_path: Path, config: dict, models: Path, capsys: pytest.CaptureFixture[str]
):
    other = tmp_path / "other"
    shutil.copytree(models / "teacher", other)
    write_tokenizer(other, 511)
    config["teacher"]["model"] = str(other)
    refused(capsys, call(tmp_path, config), "tokenizer", "unused")
    description = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**description, "vocab_size": 1024}))
    refused(capsys, call(tmp_path, config), "vocab_size", "512", "1024")
    (other / "config.json").write_text(json.dumps({**description, "architectures": ["GPT2"]}))
    refused(capsys, call(tmp_path, config), "GPT2", "Qwen3ForCausalLM")
    (other / "config.json").write_text("{")
    refused(capsys, call(tmp_path, config), "teacher.model", "config.json")


def test_port_in_use(tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = call(tmp_path, config, "--set", f"student.base_port={port}")
    refused(capsys, code, "student.base_port", str(port), "in use")


def test_run_directory_is_never_lost(
    tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]
):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "thesis.txt").write_text("years of work")
    refused(capsys, call(tmp_path, config, "--overwrite"), "thesis.txt")
    assert (run_dir / "thesis.txt").read_text() == "years of work"
    (run_dir / "thesis.txt").rename(run_dir / "config.resolved.yaml")
    refused(capsys, call(tmp_path, config), "--overwrite")


def test_control_needs_addresses(tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]):
    refused(capsys, call(tmp_path, config, verb="control"), "student.urls")


def test_serve_needs_a_fixed_port(tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    refused(capsys, main(["serve", "student", str(path)]), "student.base_port")
