"""The scripts of examples/cluster/torchrun: every command is one that its program takes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron_opd.cli.main import build_parser
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.learner.__main__ import build_parser as learner_parser
from tests.support.paths import ROOT

SCRIPTS = ROOT / "examples" / "cluster" / "torchrun"
# Says on one line what it was given and which of the scripts' variables it sees, as JSON.
SHOW = """#!{python}
import json, os, sys
seen = {{name: value for name, value in os.environ.items() if name.startswith(("OPD_", "MEGA"))}}
print(json.dumps([sys.argv[1:], seen]), flush=True)
"""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


class Scripts:
    """Runs the scripts with programs that only say what they were given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("opd", "python"):
            (folder / name).write_text(SHOW.format(python=sys.executable))
            (folder / name).chmod(0o755)
        for role in ("student", "teacher"):
            (folder / f"{role}.key").write_text(f"secret of the {role}\n")

    def done(
        self, script: str, *words: str, **settings: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str], dict[str, str]]:
        """What the script said, the words that its program got, and the variables."""
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}", "KEYS": str(self.folder)}
        command = ["bash", str(SCRIPTS / script), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment | settings)
        given, seen = json.loads(done.stdout) if done.returncode == 0 else ([], {})
        return done, given, seen

    def given(self, script: str, *words: str, **settings: str) -> tuple[list[str], dict[str, str]]:
        done, given, seen = self.done(script, *words, **settings)
        assert (done.returncode, done.stderr) == (0, "")
        assert "secret" not in " ".join(given)
        return given, seen


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def loaded(words: list[str]) -> tuple[str, Config]:
    parsed = build_parser().parse_args(words)
    return parsed.verb, load_config(Config, parsed.config, parsed.overrides)


def served(scripts: Scripts, role: str, address: str, indices: range) -> tuple[str, ...]:
    """The urls of the servers that a node's scripts start."""
    urls: list[str] = []
    for index in indices:
        words, seen = scripts.given(f"{role}.sh", NODE_ADDR=address, INDEX=str(index))
        verb, config = loaded(words)
        section = config.student if role == "student" else config.teacher
        assert section is not None
        assert (verb, section.host, section.servers) == ("serve", address, len(indices))
        assert seen[str(section.api_key_env)] == f"secret of the {role}"
        urls.append(f"http://{address}:{section.base_port + index}")
    return tuple(urls)


def test_servers_are_where_the_controller_asks(scripts: Scripts):
    words, seen = scripts.given("controller.sh")
    verb, config = loaded(words)
    assert config.teacher is not None
    assert verb == "control"
    assert "--auto-resume" in words
    assert config.student.urls == served(scripts, "student", "10.0.0.3", range(2))
    assert config.teacher.urls == served(scripts, "teacher", "10.0.0.4", range(1))
    for section, role in ((config.student, "student"), (config.teacher, "teacher")):
        assert seen[str(section.api_key_env)] == f"secret of the {role}"
    assert not config.security.insecure


def test_the_learner_joins_the_controller(scripts: Scripts):
    words, seen = scripts.given("controller.sh")
    _, control = loaded(words)
    for rank in range(2):
        words, variables = scripts.given("learner.sh", NODE_RANK=str(rank))
        assert words[:2] == ["-m", "megatron_opd.learner.torchrun"]
        torchrun = get_args_parser().parse_args(words[2:])
        assert (torchrun.module, torchrun.training_script) == (True, "megatron_opd.learner")
        assert (torchrun.node_rank, torchrun.numa_binding) == (rank, "node")
        parsed = learner_parser().parse_args(torchrun.training_script_args)
        config = load_config(Config, parsed.config, parsed.overrides)
        ranks = int(torchrun.nproc_per_node) * int(torchrun.nnodes)
        assert ranks == config.learner.parallel.world_size
        host, port = control.learner.listen_host, control.learner.listen_port
        assert parsed.controller == f"tcp://{host}:{port}"
        assert torchrun.master_addr == config.weight_sync.host == control.weight_sync.host == host
        assert config.student.model == control.student.model
        assert config.cluster.interface == "eth0"
        assert variables == {key: seen[key] for key in ("MEGATRON_OPD_KEYS_FILE",)}


def test_what_follows_a_script_s_name_is_passed_on(scripts: Scripts):
    settings = ("--set", "run.max_steps=17")
    assert loaded(scripts.given("controller.sh", *settings)[0])[1].run.max_steps == 17
    for role in ("student", "teacher"):
        words, _ = scripts.given(f"{role}.sh", *settings, NODE_ADDR="10.0.0.9")
        assert loaded(words)[1].run.max_steps == 17
    words, _ = scripts.given("learner.sh", *settings, NODE_RANK="0", NUMA_BINDING="")
    assert words[-2:] == [*settings]
    assert not [word for word in words if "numa" in word]


@pytest.mark.parametrize(
    ("script", "settings", "words"),
    [
        ("student.sh", {}, "NODE_ADDR: must be the address of this node"),
        ("learner.sh", {}, "NODE_RANK: must be 0 on MASTER_ADDR"),
        ("teacher.sh", {"NODE_ADDR": "10.0.0.4", "KEYS": "/nowhere"}, "/nowhere/teacher.key"),
        ("controller.sh", {"KEYS": "/nowhere"}, "/nowhere/student.key"),
    ],
)
def test_a_script_without_what_it_needs_starts_nothing(
    scripts: Scripts, script: str, settings: dict[str, str], words: str
):
    done, given, _ = scripts.done(script, **settings)
    assert done.returncode != 0
    assert given == []
    assert words in done.stderr


def test_the_commands_of_the_pages_are_those_of_the_scripts():
    for page in (SCRIPTS / "README.md", ROOT / "docs" / "cluster.md"):
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"bash (?:examples/cluster/torchrun/)?(\w+\.sh)", text)
        assert set(named) == {path.name for path in SCRIPTS.glob("*.sh")}
        for name, values in re.findall(r"([A-Z]+_[A-Z]+)=\S+ .*?bash \S*?(\w+\.sh)", text):
            assert name in (SCRIPTS / values).read_text(encoding="utf-8")
