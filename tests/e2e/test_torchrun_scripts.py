"""The scripts of examples/cluster/torchrun: a mixture of experts over two machines, EP 2.

The machines are network namespaces; nothing but the scripts starts anything of the run there.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.e2e.runs import START_TIMEOUT_S, write_config
from tests.support.features import needs
from tests.support.figures import bounded
from tests.support.networks import Network, network
from tests.support.paths import ROOT

pytestmark = [pytest.mark.e2e, needs("namespaces")]

SCRIPTS = ROOT / "examples" / "cluster" / "torchrun"
FIRST, SECOND = "10.78.0.1", "10.78.0.2"
UPDATES = 3


class Nodes:
    """Scripts that run on the machines; each writes a log of its own."""

    def __init__(self, machines: Network, logs: Path, settings: Mapping[str, str]) -> None:
        self.machines, self.logs = machines, logs
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1", **settings}
        self.scripts: list[subprocess.Popen[bytes]] = []

    def bash(self, address: str, script: str, **settings: str) -> subprocess.Popen[bytes]:
        """Start a script as a user does."""
        command = [*self.machines.inside(address), "bash", str(SCRIPTS / script)]
        environment = self.environment | {"NODE_ADDR": address} | settings
        with (self.logs / f"{script}-{address}-{len(self.scripts)}.log").open("wb") as log:
            self.scripts.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            )
        return self.scripts[-1]

    def learner(self) -> list[subprocess.Popen[bytes]]:
        """Start both nodes of the learner."""
        return [
            self.bash(address, "learner.sh", NODE_RANK=str(rank))
            for rank, address in enumerate((FIRST, SECOND))
        ]

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not happened():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def ended(self, *scripts: subprocess.Popen[bytes]) -> list[int]:
        """Their exit codes, when all have ended."""
        self.wait_until(lambda: all(script.poll() is not None for script in scripts))
        return [script.returncode for script in scripts]

    def left(self) -> set[psutil.Process]:
        return self.machines.processes(FIRST) | self.machines.processes(SECOND)

    def said(self) -> str:
        logs = sorted(self.logs.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in logs)


@pytest.fixture
def nodes(inputs: Path, tmp_path: Path) -> Iterator[Nodes]:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    for role in ("student", "teacher"):
        (keys / f"{role}.key").write_text(f"{role}-of-this-run\n")
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": UPDATES},
        student={"base_port": 30000},
        teacher={"base_port": 30100},
        learner={"parallel": {"dp": 2, "ep": 2}, "routing_replay": "rollout"},
        correction={"type": "truncated", "max_ratio": 2.0},
        weight_sync={"verify_every": 1},
        checkpoint={"every": 1},
        evaluation={"problems": 0},
    )
    settings = {
        "CONFIG": str(config),
        "STUDENT_MODEL": str(inputs / "student"),
        "TEACHER_MODEL": str(inputs / "teacher"),
        "TRAIN": str(inputs / "train.jsonl"),
        "HELDOUT": str(inputs / "train.jsonl"),
        "STUDENT_URLS": f"http://{SECOND}:30000",
        "TEACHER_URLS": f"http://{FIRST}:30100",
        "MASTER_ADDR": FIRST,
        "NNODES": "2",
        "GPUS_PER_NODE": "1",
        "NUMA_BINDING": "",
        "KEYS": str(keys),
    }
    with network([FIRST, SECOND], tmp_path) as machines:
        made = Nodes(machines, tmp_path, settings)
        try:
            yield made
        finally:
            for process in made.left():
                process.kill()
            for script in made.scripts:
                script.wait()


def test_a_mixture_on_two_nodes(nodes: Nodes, inputs: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    metrics = run_dir / "metrics.jsonl"
    servers = [nodes.bash(SECOND, "student.sh"), nodes.bash(FIRST, "teacher.sh")]
    learner, controller = nodes.learner(), nodes.bash(FIRST, "controller.sh")
    nodes.wait_until(lambda: controller.poll() is not None or has_content(metrics))
    assert controller.poll() is None, nodes.said()
    assert ranks_on(nodes, FIRST).keys() == {"0 of 2, node 0"}
    assert ranks_on(nodes, SECOND).keys() == {"1 of 2, node 1"}
    for address in (FIRST, SECOND):
        doors = nodes.machines.listening(address)
        assert {address} <= doors <= {address, "127.0.0.1"}, "open to other networks"

    # a rank is lost: both scripts end, and what README.md says brings the learner back
    (lost,) = ranks_on(nodes, SECOND).values()
    lost.kill()
    assert 0 not in nodes.ended(*learner), nodes.said()
    assert controller.poll() is None, nodes.said()
    learner = nodes.learner()
    assert nodes.ended(controller, *learner) == [0, 0, 0], nodes.said()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["updates"]) == ("finished", UPDATES)
    assert summary["learner_restarts"] == 1
    assert summary["samples_dropped"] == {}
    bounded("opd run: max |p_learner - p_sampler|", summary["probs_diff_max"], 1e-4, "ep 2")
    final = run_dir / "checkpoints" / "final"
    assert held(nodes, final) == {"version": UPDATES, "differing": [], "missing": []}
    before = load_file(inputs / "student" / "model.safetensors")
    after = load_file(final / "model.safetensors")
    experts = [name for name in before if ".experts." in name]
    moved = [name for name in experts if not before[name].equal(after[name])]
    assert len(moved) > 0.9 * len(experts), "the experts of both ranks learn"

    for script in servers:
        script.terminate()
    nodes.ended(*servers)
    assert nodes.left() == set(), "processes are left"


def has_content(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def ranks_on(nodes: Nodes, address: str) -> dict[str, psutil.Process]:
    """The learner's ranks that run on a machine, by what torchrun told them."""
    found: dict[str, psutil.Process] = {}
    for process in nodes.machines.processes(address):
        environment: dict[str, str] = {}
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            environment = process.environ()
        if "RANK" in environment:
            found["{RANK} of {WORLD_SIZE}, node {GROUP_RANK}".format_map(environment)] = process
    return found


def held(nodes: Nodes, checkpoint: Path) -> dict[str, object]:
    """What the student's server holds, asked on its own machine."""
    program = [sys.executable, "-m", "tests.e2e.holding", f"http://{SECOND}:30000", str(checkpoint)]
    key = {"OPD_STUDENT_KEY": "student-of-this-run"}
    command = [*nodes.machines.inside(SECOND), *program]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | key, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
