"""Bad input: one line on stderr, exit code 2, no traceback, nothing started."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_opd.cli.main import main
from megatron_opd.cli.tables import check
from megatron_opd.config.servers import ServerConfig
from megatron_opd.data.end_tokens import EndTokens
from megatron_opd.errors import UserError
from megatron_opd.fleet.startup import ServedModel, check_served
from megatron_opd.run import pipeline
from sglang_bridge.lifetime import PARENT_VARIABLE
from sglang_bridge.protocol import ServerEnds, ServerInfo
from tests.support.cli_cases import call, refused
from tests.support.models import write_tokenizer


def test_check_prints_the_plan(tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]):
    assert call(tmp_path, config, verb="check") == 0
    printed = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM" in printed
    assert "128 permits" in printed


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
        ("data.max_prompt_tokens=1", ["all 1 usable prompts", "limit of 1"]),
        ("rollout.max_new_tokens=2041", ["rollout.max_new_tokens", "minus 7", "2041"]),
        ("student.context_length=81 data.train=long", ["longer than the limit of 10 tokens"]),
        ("evaluation.max_new_tokens=2048", ["evaluation.max_new_tokens", "2048"]),
        ("student.max_total_tokens=100", ["student.max_total_tokens", "2048", "100"]),
        ("teacher.context_length=100", ["teacher.context_length", "100", "2048"]),
        ("learner.parallel.tp=3", ["learner.parallel.tp", "attention heads", "tp=3"]),
        ("learner.parallel.pp=4", ["learner.parallel.pp", "layers", "pp=4"]),
        ("learner.parallel.ep=8 learner.parallel.dp=8", ["learner.parallel.ep", "experts", "ep=8"]),
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
        ("student.extra_args=['--port=1']", ["student.extra_args", "--port", "student.base_port"]),
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
        (lambda d: _cut(d / "model.safetensors"), ["model.safetensors", "is incomplete"]),
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
        (lambda d: _describe(d, num_local_experts=8), ["lacks", "mlp.experts.4."]),
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
        "deterministic": True,
        "ends": ServerEnds((1,), (1,)),
    }
    return ServerInfo(**{**facts, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": 1024}, "512 ids, got 1024"),
        ({"dtype": "float32"}, "bfloat16, got float32"),
        ({"quantization": "int8"}, "must hold quantization none, got int8"),
        ({"model_path": "/etc"}, "got /etc"),
        ({"version": 3}, "version 3 of another run: restart it"),
        (
            {"ends": ServerEnds((1, 7), (1,))},
            r"must end responses at ids \[1\], as config.json, .*, got \[1, 7\]",
        ),
        ({"ends": ServerEnds((1,), (1, 9))}, r"at ids \[1\], .*, got \[1, 9\]: give it the same"),
        ({"ends": ServerEnds((), None)}, r"at ids \[1\], .*, got \[\]"),
        ({"deterministic": False}, "started with --enable-deterministic-inference, as run.determ"),
    ],
)
def test_servers_elsewhere_must_serve_the_model(models: Path, fields: dict, words: str):
    section = ServerConfig(model=models / "student", urls=("http://127.0.0.1:1/",))
    assert section.urls == ("http://127.0.0.1:1",)
    model, key = ServedModel(512, EndTokens((1,), 1, asked=(5,))), "student.urls"
    other = ServedModel(512, EndTokens((1,), 3))
    check_served(key, served(), section, model, deterministic=True)
    check_served(key, served(deterministic=False), section, model, deterministic=False)
    # without a tokenizer it ends at fewer: requests name the others
    no_tokenizer = served(ends=ServerEnds((1,), None))
    check_served(key, no_tokenizer, section, other, deterministic=True)
    with pytest.raises(UserError, match=words):
        check_served(key, served(**fields), section, model, deterministic=True)


def test_control_needs_addresses(tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]):
    refused(capsys, call(tmp_path, config, verb="control"), "student.urls")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_preempted_before_it_begins_is_to_be_started_again(
    tmp_path: Path,
    config: dict,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
):
    """Before: 130 for SIGTERM; SIGUSR1 killed the program."""
    monkeypatch.setattr(pipeline, "run_pipeline", lambda *_, **__: os.kill(os.getpid(), number))
    assert call(tmp_path, config) == os.EX_TEMPFAIL
    said = capsys.readouterr()
    assert said.err == f"preempted: {number.name}: nothing was begun yet\n"
    # a scheduler may send it to every program of a job
    monkeypatch.setattr(check, "check", lambda *_, **__: os.kill(os.getpid(), signal.SIGUSR1))
    assert call(tmp_path, config, verb="check") == 0


def test_serve_needs_a_fixed_port(tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    refused(capsys, main(["serve", "student", str(path)]), "student.base_port")


def test_no_learner_outlives_a_killed_run(tmp_path: Path):
    # `opd run` in miniature: it starts a learner world, whose rank here only sleeps
    world = [sys.executable, "-m", "megatron_opd.learner.torchrun", "--nproc-per-node=1"]
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


@pytest.mark.parametrize(
    "address", ["tcp://nohost", "host:29400", "http://h:1", "tcp://h:port", "tcp://h:1/x"]
)
def test_a_controllers_address_is_whole(address: str, capsys: pytest.CaptureFixture[str]):
    from megatron_opd.learner.__main__ import build_parser

    arguments = ["config.yaml", "--controller"]
    assert build_parser().parse_args([*arguments, "tcp://[::1]:29400"]).controller
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([*arguments, address])
    assert ended.value.code == 2
    assert f"must be tcp://HOST:PORT, got {address!r}" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["megatron_opd.learner.torchrun", "megatron_opd.learner"])
def test_a_learner_whose_run_ended_before_it_could_ask_does_not_start(module: str):
    environment = os.environ | {PARENT_VARIABLE: str(os.getppid())}  # not who starts it here
    command = [sys.executable, "-m", module]
    if module == "megatron_opd.learner":
        command += ["none.yaml", "--controller", "tcp://127.0.0.1:1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip() == f"process {os.getppid()}, which started this one, has ended"
