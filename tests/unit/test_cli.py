"""Bad input: one line on stderr, exit code 2, no traceback, nothing started."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_opd.cli import commands
from megatron_opd.cli.accuracy import Accuracies
from megatron_opd.cli.errors import UserError
from megatron_opd.cli.main import main
from megatron_opd.cli.preflight import check_served, check_support, read_model
from megatron_opd.cli.prepare import prepare
from megatron_opd.cli.roles import all_roles, section_of, teacher_roles
from megatron_opd.cli.servers import server_processes
from megatron_opd.config.schema import Config, ServerConfig
from megatron_opd.evaluation import EvaluationReport
from sglang_bridge.protocol import ServerInfo
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
        assert word.lower() in lines[0].lower()


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
        ("rollout.max_new_tokens=2041", ["rollout.max_new_tokens", "less 7", "2041"]),
        ("student.context_length=81 data.train=long", ["longer than the limit of 10 tokens"]),
        ("evaluation.max_new_tokens=2048", ["evaluation.max_new_tokens", "2048"]),
        ("student.max_total_tokens=100", ["student.max_total_tokens", "2048", "100"]),
        ("teacher.context_length=100", ["teacher.context_length", "100", "2048"]),
        ("learner.parallel.tp=3", ["learner.parallel.tp", "attention heads", "tp=3"]),
        ("learner.parallel.tp=4", ["learner.parallel.tp", "key-value heads", "tp=4"]),
        ("learner.parallel.pp=4", ["learner.parallel.pp", "layers", "pp=4"]),
        ("learner.parallel.ep=8", ["learner.parallel.ep", "experts", "ep=8"]),
        ("student.tp=3", ["student.tp", "attention heads", "tp=3"]),
        ("run.seed=99999999999", ["run.seed", "99999999999"]),
        ("student.base_port=80", ["base_port", "1024..65535", "80"]),
        ("student.base_port=65535 student.servers=2", ["base_port", "65535", "servers=2"]),
        ("student.base_port=30000 teacher.base_port=30000", ["student.base_port", "teacher.base"]),
        ("student.base_port=30000 learner.listen_port=30000", ["learner.listen_port", "30000"]),
        ("student.host=192.0.2.1", ["student.host", "192.0.2.1"]),
        ("learner.listen_host=192.0.2.1", ["learner.listen_host", "192.0.2.1"]),
        ("weight_sync.host=192.0.2.1", ["weight_sync.host", "192.0.2.1"]),
        ("student.urls=['localhost:1']", ["student.urls", "http(s)://HOST:PORT", "localhost:1"]),
        ("student.urls=['http://a:x']", ["student.urls", "http://a:x"]),
        ("student.urls=['http://a:1','http://a:1/']", ["student.urls", "http://a:1", "twice"]),
        ("run.dir=/etc/passwd/x", ["run.dir", "/etc/passwd is a file"]),
        ("run.dir=/proc/x", ["run.dir", "/proc/x", "cannot be written"]),
        (f"run.dir=/{'x' * 300}", ["run.dir", "name too long"]),
    ],
)
def test_refusals_of_single_keys(
    tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str], override: str, words: list
):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "+" * 11}) + "\n")
    override = override.replace("=long", f"={long}")
    options = [word for one in override.split() for word in ("--set", one)]
    refused(capsys, call(tmp_path, config, *options), *words)
    assert not (tmp_path / "run").exists()


def test_data_files(tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]):
    train = Path(config["data"]["train"])
    train.write_text("")
    refused(capsys, call(tmp_path, config), str(train), "no rows")
    train.write_text('{"prompt": "a"}\n{"prompt": \n')
    refused(capsys, call(tmp_path, config), f"{train}:2")
    train.write_text('{"prompt": "a"}\n{"prompt": "\\ud800"}\n')
    refused(capsys, call(tmp_path, config), f"{train}:2", "Unicode")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: _cut(d / "model.safetensors"), ["model.safetensors", "not whole"]),
        (lambda d: (d / "model.safetensors").write_bytes(b""), ["not a readable safetensors"]),
        (lambda d: (d / "model.safetensors").write_bytes(b"version https://git-lfs"), ["header"]),
        (lambda d: (d / "model.safetensors").unlink(), ["neither model.safetensors nor"]),
        (
            lambda d: (d / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}})
            ),
            ["lacks model-00002-of-00002.safetensors"],
        ),
        (lambda d: (d / "tokenizer.json").write_text("{"), ["tokenizer"]),
        (lambda d: _describe(d, num_hidden_layers=3), ["lacks", "model.layers.2."]),
        (lambda d: _describe(d, hidden_size=32), ["embed_tokens", "[512, 32]", "[512, 64]"]),
        (lambda d: _describe(d, num_experts=8), ["mlp.gate", "[8, 64]", "[4, 64]"]),
        (lambda d: _describe(d, hidden_size="64"), ["hidden_size", "integer", "'64'"]),
        (lambda d: _describe(d, num_attention_heads=0), ["num_attention_heads", "got 0"]),
        (lambda d: _describe(d, eos_token_id="x"), ["student.model", "eos_token_id"]),
    ],
)
def test_checkpoints_that_are_not_whole(
    tmp_path: Path,
    config: dict,
    models: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], object],
    words: list[str],
):
    broken = tmp_path / "broken"
    shutil.copytree(models / "student", broken)
    spoil(broken)
    config["student"]["model"] = str(broken)
    refused(capsys, call(tmp_path, config), "student.model", *words)
    assert not (tmp_path / "run").exists()


def _describe(directory: Path, **values: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


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


def with_teachers(tmp_path: Path, config: dict, models: Path, named: list[str | None]) -> dict:
    """Two teachers, `teacher` and `math`; one prompt for each name."""
    rows = [{"prompt": "1+1=", "from": name} for name in named]
    train = Path(config["data"]["train"])
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["data"]["teacher_key"] = "from"
    shutil.copytree(models / "teacher", tmp_path / "math", dirs_exist_ok=True)
    config["teachers"] = {"math": {"model": str(tmp_path / "math")}}
    return config


def test_every_prompt_names_a_teacher_that_there_is(
    tmp_path: Path, config: dict, models: Path, capsys: pytest.CaptureFixture[str]
):
    tree = with_teachers(tmp_path, config, models, ["math", "maths"])
    where = f"{config['data']['train']}:2"
    refused(capsys, call(tmp_path, tree), where, "'from' must be one of math, teacher, got 'maths'")
    tree = with_teachers(tmp_path, config, models, ["math", None])
    refused(capsys, call(tmp_path, tree), where, "'from' must be a string")
    tree = with_teachers(tmp_path, config, models, ["math", "teacher"])
    assert prepare(Config.model_validate(tree)).prompts.__next__().teacher in ("math", "teacher")


def test_every_teacher_is_checked(
    tmp_path: Path, config: dict, models: Path, capsys: pytest.CaptureFixture[str]
):
    tree = with_teachers(tmp_path, config, models, ["math"])
    refused(capsys, call(tmp_path, tree, "--set", "teachers.math.tp=3"), "teachers.math.tp", "tp=3")
    words = "teachers.math.context_length must be >= student.context_length", "100 and 2048"
    refused(capsys, call(tmp_path, tree, "--set", "teachers.math.context_length=100"), *words)
    tree["run"]["dir"] = str(tmp_path)
    tree["data"]["train"] = "/nowhere"
    tree["student"]["model"] = tree["teacher"]["model"]
    refused(capsys, call(tmp_path, tree), "teachers.math.model must lie outside run.dir")
    tree = with_teachers(tmp_path, config | {"run": {}}, models, ["math"])
    write_tokenizer(tmp_path / "math", 511)
    refused(capsys, call(tmp_path, tree), "student.model and teachers.math.model", "one tokenizer")
    tree["teachers"] = {"a/b": {"model": str(models / "teacher")}}
    refused(capsys, call(tmp_path, tree), "teachers", "letters", "'a/b'")


def test_roles_and_their_logs(tmp_path: Path, config: dict, models: Path):
    tree = Config.model_validate(with_teachers(tmp_path, config, models, ["math"]))
    assert all_roles(tree) == ("student", "teacher", "teachers.math")
    assert teacher_roles(tree) == {"teacher": "teacher", "math": "teachers.math"}
    assert section_of(tree, "teachers.math") is tree.teachers["math"]
    (server,) = server_processes(tree, "teachers.math", tmp_path)
    assert (server.spec.role, server.spec.model_path) == ("teacher", str(tmp_path / "math"))
    assert server.log_path == tmp_path / "teacher-math-0.log"


GRPO = {"objective": {"type": "grpo"}, "support": {"type": "path"}}


def test_rewards_alone_need_no_teacher_and_start_none(tmp_path: Path, config: dict):
    config["rollout"]["group_size"] = 4
    for teacher in (config["teacher"], None):
        tree = Config.model_validate(config | GRPO | {"teacher": teacher})
        assert all_roles(tree) == ("student",)
        source = prepare(tree).prompts
        assert [next(source).uid // 4 for _ in range(5)] == [0, 0, 0, 0, 1]
        with pytest.raises(UserError, match="the roles are: student"):
            section_of(tree, "teachers.math")


def test_a_large_vocabulary_is_not_cached_whole(models: Path, config: dict):
    student = replace(read_model(models / "student", "student.model"), vocab_size=8192)
    tree = Config.model_validate(config | {"support": {"type": "exact"}})
    check_support(tree, student)
    with pytest.raises(UserError, match=r"support.type exact .* at most 8192 ids, got 8193"):
        check_support(tree, replace(student, vocab_size=8193))


def test_accuracies_of_several_teachers(tmp_path: Path, config: dict, models: Path, monkeypatch):
    reports = {"student": 10.0, "teacher": 90.0, "math": 80.0}

    async def evaluate(port, prompts, judge, plan):
        return EvaluationReport(reports[port._fleet], 1.0, 2, 2, 3.0, 0.0)

    monkeypatch.setattr("megatron_opd.cli.accuracy.evaluate", evaluate)
    config["data"]["heldout"] = config["data"]["train"]
    config["evaluation"] = {"problems": 1}
    prepared = prepare(Config.model_validate(config))

    def summary(names: list[str]) -> dict:
        accuracies = Accuracies(Config.model_validate(config), prepared)
        lines = asyncio.run(accuracies.before("student", {name: name for name in names}))
        assert len(lines) == 1 + len(names)
        return accuracies.summary()

    assert "teacher_accuracy_pct_by_name" not in summary(["teacher"])
    assert summary(["teacher"])["teacher_accuracy_pct"] == 90
    assert summary([])["teacher_accuracy_pct"] is None
    both = summary(["teacher", "math"])
    assert both["teacher_accuracy_pct"] == 90
    assert both["teacher_accuracy_pct_by_name"] == {"teacher": 90.0, "math": 80.0}
    assert set(both["evaluations"]) == {"student before", "teacher", "teacher math"}
    assert summary(["math"])["teacher_accuracy_pct"] is None
    assert summary(["math"])["teacher_accuracy_pct_by_name"] == {"math": 80.0}


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
    (run_dir / "config.resolved.yaml").unlink()
    (run_dir / "checkpoints").mkdir()  # a name of ours does not make it ours
    refused(capsys, call(tmp_path, config, "--overwrite"), "checkpoints")


def test_overwrite_spares_what_the_run_reads(
    tmp_path: Path, config: dict, models: Path, capsys: pytest.CaptureFixture[str]
):
    earlier = tmp_path / "run"
    final = earlier / "checkpoints" / "final"
    shutil.copytree(models / "student", final)
    (earlier / "config.resolved.yaml").write_text("")
    config["student"]["model"] = str(final)
    refused(capsys, call(tmp_path, config, "--overwrite"), "student.model", "run.dir", str(final))
    assert (final / "model.safetensors").exists()


def test_make_data_never_replaces_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["make-data", "arithmetic", "--train", "4", "--heldout", "2", "--out"]
    assert main([*arguments, str(tmp_path)]) == 0
    capsys.readouterr()
    refused(capsys, main([*arguments, str(tmp_path)]), "train.jsonl", "exists")
    refused(capsys, main([*arguments, str(tmp_path / "train.jsonl")]), "--out", "train.jsonl")


def served(**fields: object) -> ServerInfo:
    facts = {
        "url": "http://127.0.0.1:1",
        "model_path": "/nowhere/student",
        "vocab_size": 512,
        "context_length": 2048,
        "tp_size": 1,
        "ep_size": 1,
        "version": 0,
        "dtype": "bfloat16",
        "max_total_tokens": 1,
    }
    return ServerInfo(**{**facts, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": 1024}, "512 ids, got 1024"),
        ({"dtype": "float32"}, "bfloat16, got float32"),
        ({"model_path": "/etc"}, "got /etc"),
        ({"version": 3}, "version 3 of another run: restart it"),
    ],
)
def test_servers_elsewhere_must_serve_the_model(models: Path, fields: dict, words: str):
    section = ServerConfig(model=models / "student", urls=("http://127.0.0.1:1/",))
    assert section.urls == ("http://127.0.0.1:1",)
    check_served("student.urls", served(), section, 512)
    with pytest.raises(UserError, match=words):
        check_served("student.urls", served(**fields), section, 512)


def test_control_needs_addresses(tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]):
    refused(capsys, call(tmp_path, config, verb="control"), "student.urls")


def test_serve_needs_a_fixed_port(tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    refused(capsys, main(["serve", "student", str(path)]), "student.base_port")


def test_serve_names_a_teacher(tmp_path: Path, config: dict, models: Path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(with_teachers(tmp_path, config, models, ["math"])))

    def serve(role: str, name: str | None) -> int:
        return commands.serve(Namespace(config=path, overrides=[], role=role, name=name, index=0))

    with pytest.raises(UserError, match=r"teachers\.math\.base_port must be a fixed port"):
        serve("teacher", "math")
    with pytest.raises(UserError, match=r"serve: teacher\.base_port must be a fixed port"):
        serve("teacher", None)
    with pytest.raises(UserError, match=r"roles are: student, teacher, teachers\.math"):
        serve("teacher", "maths")
    with pytest.raises(UserError, match="--name chooses among teachers"):
        serve("student", "math")


def test_no_learner_outlives_a_killed_run(tmp_path: Path):
    # `opd run` in miniature: it starts a learner world, whose rank here only sleeps
    world = [sys.executable, "-m", "megatron_opd.learner.world", "--nproc-per-node=1"]
    world += ["--master-port=0", "--no-python", "sleep", "600"]
    program = f"import subprocess; subprocess.run({world!r}, start_new_session=True)"
    with (tmp_path / "log").open("wb") as log:
        owner = subprocess.Popen([sys.executable, "-c", program], stdout=log, stderr=log)
    family = psutil.Process(owner.pid)
    try:
        deadline = time.monotonic() + 120
        while not any(process.name() == "sleep" for process in family.children(recursive=True)):
            assert owner.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, "torchrun did not start its rank"
            time.sleep(0.1)
        started = family.children(recursive=True)
    finally:
        owner.kill()
        owner.wait()
    alive = psutil.wait_procs(started, timeout=20)[1]
    for process in alive:
        process.kill()
    assert not alive
