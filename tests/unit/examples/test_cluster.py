"""The cluster examples: their plans, and every command that a run of them would start."""

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from megatron_opd.cli.main import build_parser, main
from megatron_opd.config.load import load_config
from megatron_opd.config.roles import all_roles
from megatron_opd.config.schema import Config
from megatron_opd.launch.launcher import NodePlace, ProcessSpec
from megatron_opd.launch.machines import Launched
from megatron_opd.launch.placement import place
from megatron_opd.launch.placing import parts_of
from megatron_opd.launch.ports import JobPorts
from megatron_opd.launch.slurm import SlurmLauncher
from megatron_opd.launch.slurm_process import SlurmProcess
from megatron_opd.launch.step import build_parser as step_parser
from megatron_opd.learner.__main__ import build_parser as learner_parser
from tests.support.cli_cases import refused
from tests.support.paths import ROOT
from tests.support.slurm import StandInNode, StandInSlurm
from tests.support.wire import KEYS

CLUSTER = ROOT / "examples" / "cluster"
NODES = {"one_node": 1, "four_nodes": 4, "sixteen_nodes": 16}
JOB = CLUSTER / "job.slurm"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(example: str) -> Config:
    return load_config(Config, CLUSTER / example / "config.yaml")


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ("one_node", ["1.72 B", "30.53 B", "3.35 B", "49.6", "71.1 GiB", "202,752"]),
        ("four_nodes", ["30.53 B", "235.09 B", "22.19 B", "0 8", "0 1 2 3", "54.1", "56.9 GiB"]),
        ("sixteen_nodes", ["235.09 B", "87.7", "0 8 .. 56", "0 1 2 3", "expert dp", "437.9 GiB"]),
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


@pytest.mark.parametrize("example", ["four_nodes", "sixteen_nodes"])
def test_a_mixture_s_learner_computes_what_its_servers_do(
    example: str, capsys: pytest.CaptureFixture[str]
):
    """Before: EP 8 against 2, TP 4 against 8; the full ratio and the learner's own experts."""
    assert main(["check", str(CLUSTER / example / "config.yaml")]) == 0
    printed = capsys.readouterr().out
    table = printed.split("learner and sampler")[1].split("a weight sync")[0]
    same = [line.split()[-1] for line in table.splitlines()[4:] if line.strip()]
    assert same == ["yes"] * 5
    flat = " ".join(printed.split())
    assert "correction kappa_k = sg(min(rho_k, 2)); rho_k = p_k / o_k" in flat
    assert "routing rollout: the experts that the fleet's routers chose" in flat
    first = {line.split()[0] for line in printed.splitlines() if line.strip()}
    assert not first & {"note", "warning"}


@pytest.mark.parametrize("example", ["four_nodes", "sixteen_nodes"])
def test_a_mixture_s_layouts_must_match(example: str, capsys: pytest.CaptureFixture[str]):
    code = main(["check", str(CLUSTER / example / "config.yaml"), "--set", "student.ep=2"])
    refused(capsys, code, "weight_sync.match=require", "learner.parallel.ep=4", "student.ep=2")


def test_check_of_an_example_needs_no_torch():
    # the others' settings are Megatron's to judge
    program = (
        "import sys; from megatron_opd.cli.main import main; "
        "code = main(['check', 'examples/cluster/one_node/config.yaml']); "
        "sys.exit(code or sum(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("example", "override", "words"),
    [
        ("sixteen_nodes", "learner.gpu_memory_gib=79", ["optimizer", "ep=8 would fit"]),
        (
            "four_nodes",
            "learner.recompute=none learner.gpu_memory_gib=72",
            ["activations", "learner.recompute=selective"],
        ),
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


class Noted(SlurmLauncher):
    """Places as on a real cluster; what it would start, it notes."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[list[str], NodePlace]] = []

    def process(self, spec: ProcessSpec, place: NodePlace) -> SlurmProcess:
        process = super().process(spec, place)
        process.start = lambda: self.started.append((process.command, place))
        return process


def launched(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Noted]:
    """Start an example on as many nodes as it needs, of 8 GPUs each."""
    count = range(1, NODES[example] + 1)
    nodes = [StandInNode(f"n{i}", "gpu:8(IDX:0-7)", address=f"10.0.0.{i}") for i in count]
    StandInSlurm(tmp_path / "bin", *nodes).enter(monkeypatch)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    # nothing is asked of addresses that are not ours
    ports = partial(JobPorts, taken=lambda host, port: False)
    monkeypatch.setattr("megatron_opd.launch.slurm.JobPorts", ports)
    given = load_config(Config, CLUSTER / example / "config.yaml", ["cluster.type=slurm"])
    noted, roles = Noted(), all_roles(given)
    machines = Launched(given, roles, noted, lambda line: None)
    learner = machines.learner(
        CLUSTER / example / "config.yaml", f"tcp://{noted.host}:29400", KEYS.ranks, tmp_path / "log"
    )
    servers = [server for role in roles for server in machines.servers(role, tmp_path, "key")]
    assert learner is not None
    for part in (learner, *servers):
        part.start()
    return machines.config, noted


def on_its_node(command: list[str]) -> tuple[str, tuple[int, ...], list[str]]:
    """The node, the GPUs and the arguments of the node's Python."""
    start = command.index("megatron_opd.launch.step") + 1
    step = step_parser().parse_args(command[start:])
    (node,) = (word.removeprefix("--nodelist=") for word in command if "--nodelist=" in word)
    return node, step.gpus, step.arguments


@pytest.mark.parametrize("example", sorted(NODES))
def test_every_command_is_one_that_the_programs_take(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, noted = launched(example, tmp_path, monkeypatch)
    resolved = CLUSTER / example / "config.yaml"
    servers: dict[str, list[Any]] = {"student": [], "teacher": []}
    learners: list[tuple[int, int]] = []
    used: list[tuple[str, int]] = []
    for command, at in noted.started:
        node, gpus, words = on_its_node(command)
        assert (node, len(gpus)) == (at.node, at.need.gpus)
        used += [(node, gpu) for gpu in gpus]
        assert "key" not in command
        assert KEYS.learner.decode() not in " ".join(command)
        if words[1] == "megatron_opd.learner.torchrun":
            torchrun = get_args_parser().parse_args(words[2:])
            assert torchrun.module
            assert torchrun.training_script == "megatron_opd.learner"
            parsed = learner_parser().parse_args(torchrun.training_script_args)
            assert int(torchrun.nproc_per_node) == len(gpus)
            learners.append((int(torchrun.node_rank), int(torchrun.nnodes)))
            assert torchrun.master_addr == "10.0.0.1"
            assert parsed.controller == "tcp://10.0.0.1:29400"
            loaded = load_config(Config, parsed.config, parsed.overrides)
            assert loaded.weight_sync.host == "10.0.0.1"
        else:
            assert words[:2] == ["-m", "megatron_opd"]
            parsed = build_parser().parse_args(words[2:])
            loaded = load_config(Config, resolved, parsed.overrides)
            section = loaded.student if parsed.role == "student" else loaded.teacher
            assert section is not None
            servers[parsed.role].append((parsed.index, len(gpus)))
            assert (section.host, section.base_port + parsed.index) == (at.host, at.port)
    assert max(Counter(used).values()) == 1
    assert learners == [(node, len(learners)) for node in range(len(learners))]
    world = config.learner.parallel.world_size
    assert sum(at.need.gpus for _, at in noted.started if at.need.key == "learner") == world
    for role, section in (("student", config.student), ("teacher", config.teacher)):
        assert section is not None
        assert sorted(servers[role]) == [(i, section.tp) for i in range(section.servers)]
    assert {node for node, _ in used} == {f"n{i}" for i in range(1, NODES[example] + 1)}
    assert config.learner.listen_host == "10.0.0.1"


@pytest.mark.parametrize("example", sorted(NODES))
def test_a_job_is_one_command(example: str, tmp_path: Path):
    assert subprocess.run(["bash", "-n", JOB], capture_output=True).stderr == b""
    (tmp_path / "opd").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "opd").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT)}
    given = ["--set", "teacher.model=/models/with space", "--set", "run.max_steps=17"]
    script = ["bash", JOB, f"examples/cluster/{example}/config.yaml", *given]
    done = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    parsed = build_parser().parse_args(done.stdout.splitlines())
    assert parsed.verb == "run"
    loaded = load_config(Config, parsed.config, parsed.overrides)
    assert (loaded.cluster.type, loaded.run.max_steps) == ("slurm", 17)
    assert str(loaded.teacher and loaded.teacher.model) == "/models/with space"


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_job_that_is_preempted_is_requeued(tmp_path: Path, code: int):
    """Before: the job ended for good."""
    told = tmp_path / "told"
    programs = {
        # as opd: told by SIGUSR1, it ends a moment later
        "opd": f"trap 'sleep 0.3; exit {code}' USR1; echo >{told}; while :; do sleep 0.05; done",
        "scontrol": 'echo "scontrol $*"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environment["SLURM_SUBMIT_DIR"] = str(ROOT)
    script = ["bash", CLUSTER / "job.slurm", "config.yaml"]
    with subprocess.Popen(
        script, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as job:
        try:
            while not told.exists():
                assert job.poll() is None
            job.send_signal(signal.SIGUSR1)
            assert job.stdout is not None
            assert job.stdout.read() == ("scontrol requeue 7\n" if code == 75 else "")
            assert job.wait() == code
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


def test_one_node_fills_its_node():
    config = config_of("one_node")
    placement = place(parts_of(config, all_roles(config)), tuple("01234567"))
    assert placement.line == "learner 0-2, student 3 4 5 6, teacher 7"


def test_the_printed_tables_are_current():
    done = subprocess.run([sys.executable, ROOT / "tools" / "cluster_plans.py", "--check"])
    assert done.returncode == 0, "run: python tools/cluster_plans.py"
