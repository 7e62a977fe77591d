"""The cluster examples: their plans, and every command that their scripts would run."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.run import get_args_parser

from megatron_opd.cli.main import build_parser, main
from megatron_opd.cli.placing import parts_of
from megatron_opd.cli.roles import all_roles
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.launch.placement import place
from megatron_opd.learner.__main__ import build_parser as learner_parser
from tests.support.cli_cases import refused
from tests.support.paths import ROOT

CLUSTER = ROOT / "examples" / "cluster"
NODES = {"four_nodes": 4, "sixteen_nodes": 16}  # one_node is a single `opd run`
SCRIPTS = sorted([*CLUSTER.glob("*.sh"), *CLUSTER.glob("*/launch.sh"), *CLUSTER.glob("*/*.slurm")])

# A batch system of one machine: srun runs here what it is told to run on a node.
FAKE = {
    "srun": """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
  shift
done
exec "$@"
""",
    "scontrol": """#!/usr/bin/env bash
[[ $1 == show && $2 == hostnames ]] || exit 1
tr , '\\n' <<<"$3"
""",
    "getent": """#!/usr/bin/env bash
[[ $1 == ahostsv4 ]] || exit 1
echo "10.0.0.${2#node} STREAM $2"
""",
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(example: str) -> Config:
    return load_config(Config, CLUSTER / example / "config.yaml")


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ("one_node", ["1.72 B", "30.53 B", "3.35 B", "52.8", "71.1 GiB", "589,824"]),
        ("four_nodes", ["30.53 B", "235.09 B", "22.19 B", "0 8", "0 1 .. 7", "36.4", "56.9 GiB"]),
        ("sixteen_nodes", ["235.09 B", "90.8", "0 32", "0 1 .. 15", "expert dp", "437.9 GiB"]),
    ],
)
def test_check_prints_the_plan_of_each(
    example: str, words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["check", str(CLUSTER / example / "config.yaml")]) == 0
    printed = capsys.readouterr().out
    for word in [*words, "learner memory, GiB per rank"]:
        assert word in printed, word
    flat = " ".join(printed.split())
    assert "weights and tokenizer not here; opd run needs it" in flat
    assert "not checked data.train data/" in flat


def test_check_of_an_example_needs_no_torch():
    program = (
        "import sys; from megatron_opd.cli.main import main; "
        "code = main(['check', 'examples/cluster/sixteen_nodes/config.yaml']); "
        "sys.exit(code or sum(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("example", "override", "words"),
    [
        ("sixteen_nodes", "learner.gpu_memory_gib=79", ["optimizer", "ep=32 would fit"]),
        ("four_nodes", "learner.recompute=false", ["activations", "learner.recompute=true"]),
        ("four_nodes", "teacher.tp=4 teacher.ep=4", ["teacher.gpu_memory_gib", "teacher.tp=8"]),
    ],
)
def test_what_cannot_fit_is_refused(
    example: str, override: str, words: list[str], capsys: pytest.CaptureFixture[str]
):
    options = [word for one in override.split() for word in ("--set", one)]
    path = str(CLUSTER / example / "config.yaml")
    refused(capsys, main(["check", path, *options]), "gpu_memory_gib", *words)


def test_a_run_needs_more_than_config_json(capsys: pytest.CaptureFixture[str]):
    path = str(CLUSTER / "one_node" / "config.yaml")
    refused(capsys, main(["run", path]), "student.model", "model.safetensors")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_scripts_are_bash(script: Path):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def dry_run(example: str, tmp_path: Path) -> list[list[str]]:
    """The command of everything that job.slurm starts, by a batch system that only prints."""
    for name, text in FAKE.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": ",".join(f"node{i}" for i in range(1, NODES[example] + 1)),
        "DRY_RUN": "1",
        "STUDENT_MODEL": "/models/student",
        "TEACHER_MODEL": "/models/with space",
        "SETTINGS": "run.max_steps=17 run.seed=9",
    }
    done = subprocess.run(
        ["bash", CLUSTER / example / "job.slurm"], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [shlex.split(line) for line in done.stdout.splitlines()]


def words_after_environment(command: list[str]) -> list[str]:
    """The command without `env NAME=VALUE`."""
    return command[2:] if command[0] == "env" else command


def test_one_node_is_one_command(tmp_path: Path):
    (tmp_path / "opd").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "opd").chmod(0o755)
    given = {"STUDENT_MODEL": "/models/s", "TEACHER_MODEL": "/models/with space", "TRAIN": "t"}
    environment = given | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HELDOUT": "h"}
    environment["SLURM_SUBMIT_DIR"] = str(ROOT)
    script = ["bash", CLUSTER / "one_node" / "job.slurm"]
    done = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    parsed = build_parser().parse_args(done.stdout.splitlines())
    assert parsed.verb == "run"
    loaded = load_config(Config, parsed.config, parsed.overrides)
    assert loaded.teacher
    assert str(loaded.teacher.model) == "/models/with space"
    assert (str(loaded.student.model), str(loaded.data.heldout)) == ("/models/s", "h")


def test_one_node_fills_its_node():
    config = config_of("one_node")
    placement = place(parts_of(config, all_roles(config)), tuple("01234567"))
    assert placement.line == "learner 0-1, student 2 3 4 5 6, teacher 7"


@pytest.mark.parametrize("example", sorted(NODES))
def test_every_command_is_one_that_the_programs_take(example: str, tmp_path: Path):
    config = config_of(example)
    servers: dict[str, list[Any]] = {"student": [], "teacher": []}
    learners, controls, urls = [], [], {}
    for command in dry_run(example, tmp_path):
        devices = command[1].removeprefix("CUDA_VISIBLE_DEVICES=").split(",")
        words = words_after_environment(command)
        if words[0] == "torchrun":
            torchrun = get_args_parser().parse_args(words[1:])
            assert torchrun.module
            assert torchrun.training_script == "megatron_opd.learner"
            parsed = learner_parser().parse_args(torchrun.training_script_args)
            assert int(torchrun.nproc_per_node) == len(devices)
            learners.append((int(torchrun.node_rank), len(devices), torchrun.nnodes))
            assert parsed.controller == f"tcp://{torchrun.master_addr}:29400"
        else:
            assert words[0] == "opd"
            parsed = build_parser().parse_args(words[1:])
            if parsed.verb == "control":
                controls.append(parsed)
            else:
                servers[parsed.role].append((parsed.index, len(devices)))
        loaded = load_config(Config, parsed.config, parsed.overrides)
        assert loaded.learner == config.learner.model_copy(
            update={"listen_host": loaded.learner.listen_host}
        )
        assert (loaded.run.max_steps, loaded.run.seed) == (17, 9)
        assert str(loaded.student.model) == "/models/student"
        assert str(loaded.teacher and loaded.teacher.model) == "/models/with space"
        for role, section in (("student", loaded.student), ("teacher", loaded.teacher)):
            assert section is not None
            assert urls.setdefault(role, section.urls) == section.urls
            if words[:3] == ["opd", "serve", role]:  # it listens where the others will look
                address = f"http://{section.host}:{section.base_port + parsed.index}"
                assert section.urls[parsed.index] == address
    world = config.learner.parallel.world_size
    nodes = len(learners)
    assert sorted(learners) == [(rank, world // nodes, str(nodes)) for rank in range(nodes)]
    assert len(controls) == 1
    for role, section in (("student", config.student), ("teacher", config.teacher)):
        assert section is not None
        assert sorted(servers[role]) == [(i, section.tp) for i in range(section.servers)]


PROGRAM = """#!/usr/bin/env bash
echo $$ >>"$PIDS"
[[ "$*" != *"--index 0"* ]] || exit "$CODE"
exec sleep 600
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_servers_of_a_node_end_together(tmp_path: Path, code: int):
    """Four servers that would run for ever, but for the first."""
    (tmp_path / "opd").write_text(PROGRAM)
    (tmp_path / "opd").chmod(0o755)
    pids = tmp_path / "pids"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PIDS": str(pids),
        "CODE": str(code),
        "HOSTS": "10.0.0.1 10.0.0.2 10.0.0.3 10.0.0.4",
    }
    script = ["bash", CLUSTER / "four_nodes" / "launch.sh", "student", "0"]
    done = subprocess.run(script, env=environment, timeout=60)
    assert done.returncode == code
    started = [int(line) for line in pids.read_text().split()]
    assert started
    alive = [pid for pid in started if psutil.pid_exists(pid)]
    for pid in alive:
        psutil.Process(pid).kill()
    assert not alive


@pytest.mark.parametrize(
    ("arguments", "hosts", "words"),
    [
        (["learner", "0"], "10.0.0.1", "HOSTS must list 4 addresses"),
        (["control"], "", "HOSTS must list the addresses"),
        (["student"], "1 2 3 4", "student needs the number of its node, got ''"),
        (["teach"], "1 2 3 4", "give a part"),
    ],
)
def test_launch_refuses_what_it_cannot_read(arguments: list[str], hosts: str, words: str):
    environment = {"PATH": os.environ["PATH"], "HOSTS": hosts, "DRY_RUN": "1"}
    script = ["bash", CLUSTER / "four_nodes" / "launch.sh"]
    done = subprocess.run([*script, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert words in done.stderr


def test_the_printed_tables_are_current():
    done = subprocess.run([sys.executable, ROOT / "tools" / "cluster_plans.py", "--check"])
    assert done.returncode == 0, "run: python tools/cluster_plans.py"
