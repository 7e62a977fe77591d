"""The Slurm launcher on stand-ins for srun and scontrol: what runs where, and how it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_opd.launch.launcher import (
    CannotPlace,
    Launcher,
    Need,
    NodePlace,
    Process,
    ProcessSpec,
)
from megatron_opd.launch.slurm import SlurmLauncher
from tests.support.slurm import StandInNode, StandInSlurm

NEEDS = [Need("learner", 0, 4), Need("student", 0, 2), Need("student", 1, 2), Need("teacher", 0, 2)]
SEES = """
import os
print(*(os.environ.get(name) for name in ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "SECRET")))
print(open("/proc/self/cmdline").read().replace(chr(0), " "))
raise SystemExit(5)
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInSlurm:
    """Three nodes; of the last Slurm gave the job GPUs 4 to 7."""
    nodes = [
        StandInNode("n1", "gpu:4(IDX:0-3)", "0,1,2,3"),
        StandInNode("n2", "gpu:4(IDX:0-3)", "0,1,2,3"),
        StandInNode("n3", "gpu:4(IDX:4-7)", "4,5,6,7"),
    ]
    found = StandInSlurm(tmp_path / "bin", *nodes)
    found.enter(monkeypatch)
    return found


def quiet(line: str) -> None:
    """Says nothing."""


def spec_of(tmp_path: Path, *arguments: str, **env: str) -> ProcessSpec:
    return ProcessSpec("student server 0", arguments, env, tmp_path / "logs" / "it.log")


def ended(process: Process) -> int:
    deadline_s = time.monotonic() + 30
    while (code := process.exit_code()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return code


def until(text: str, log: Path) -> str:
    deadline_s = time.monotonic() + 30
    while text not in (found := log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.02)
    return found


def test_places(slurm: StandInSlurm):
    launcher: Launcher = SlurmLauncher()
    said: list[str] = []
    places = launcher.reserve(NEEDS, said.append)
    assert [place.need for place in places] == NEEDS
    assert [place.node for place in places] == ["n1", "n2", "n2", "n3"]
    assert {place.host for place in places} == {"127.0.0.1"} == {launcher.host}
    assert len({place.port for place in places}) == 4  # also where addresses are the same
    assert said == [
        "Slurm job 4711: n1: learner 0 (GPUs 0-3); n2: student 0 (GPUs 0-1), student 1 (GPUs 2-3); "
        "n3: teacher 0 (GPUs 0-1)"
    ]


def test_a_process_on_its_node(
    slurm: StandInSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "1")  # with --exclusive a job gets all there are
    launcher = SlurmLauncher()
    *_, teacher = launcher.reserve(NEEDS, quiet)
    spec = spec_of(tmp_path, "-c", SEES, SECRET="hidden")
    process = launcher.process(spec, teacher)
    assert process.exit_code() is None
    process.start()
    assert ended(process) == 5
    seen, command, *_ = spec.log.read_text().splitlines()
    assert seen == "n3 4,5 hidden"
    assert "hidden" not in command
    assert "hidden" not in " ".join(process.command)
    process.stop(1)
    process.stop(1)


def test_stop_ends_what_runs(slurm: StandInSlurm, tmp_path: Path):
    launcher = SlurmLauncher()
    place = launcher.reserve([Need("student", 0, 0)], quiet)[0]
    deaf = "import os, signal, time; signal.signal(15, lambda *_: print('told', flush=True)); "
    deaf += "print(os.getpid(), flush=True); [time.sleep(600) for _ in range(3)]"
    spec = spec_of(tmp_path, "-c", deaf)
    process = launcher.process(spec, place)
    process.stop(1)  # nothing was started
    process.start()
    pid = int(until("\n", spec.log))
    assert process.exit_code() is None
    process.stop(1)
    assert not psutil.pid_exists(pid)
    assert (process.exit_code(), spec.log.read_text()) == (128 + signal.SIGKILL, f"{pid}\ntold\n")


def test_a_step_that_does_not_answer_is_left_to_slurm(
    slurm: StandInSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("megatron_opd.launch.slurm_process.STEP_S", 0.5)
    monkeypatch.setattr("megatron_opd.launch.slurm_process.FORCE_S", 0.5)
    launcher = SlurmLauncher()
    place = launcher.reserve([Need("student", 0, 0)], quiet)[0]
    spec = spec_of(tmp_path, "-c", "import os, time; print(os.getpid()); time.sleep(600)")
    process = launcher.process(spec, place)
    process.start()
    pid = int(until("\n", spec.log))
    os.kill(psutil.Process(pid).ppid(), signal.SIGSTOP)
    process.stop(0.1)
    assert process.exit_code() == -signal.SIGKILL
    assert not psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], 20)[1]


CONTROLLER = """
import sys, time
from pathlib import Path
from megatron_opd.launch.launcher import Need, ProcessSpec
from megatron_opd.launch.slurm import SlurmLauncher
launcher = SlurmLauncher()
(place,) = launcher.reserve([Need("learner", 0, 1)], print)
arguments = ("-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
launcher.process(ProcessSpec("learner 0", arguments, {}, Path(sys.argv[1])), place).start()
time.sleep(600)
"""


def test_nothing_outlives_a_controller_that_is_killed(slurm: StandInSlurm, tmp_path: Path):
    log = tmp_path / "log"
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(log)])
    process = psutil.Process(int(until("\n", log)))
    family = [process, *process.parents()[:1]]
    assert "megatron_opd.launch.step" in family[1].cmdline()
    controller.kill()
    controller.wait()
    assert not psutil.wait_procs(family, 20)[1]


def test_a_place_is_kept_until_its_node_is_lost(slurm: StandInSlurm):
    launcher = SlurmLauncher()
    places = launcher.reserve([Need("student", i, 2) for i in range(5)], quiet)
    assert [place.node for place in places] == ["n1", "n1", "n2", "n2", "n3"]
    assert launcher.replace(places[4], quiet) is places[4]
    slurm.nodes[1].state = "DOWN*"
    slurm.describe()
    said: list[str] = []
    moved = launcher.replace(places[2], said.append)
    assert (moved.need, moved.node) == (places[2].need, "n3")
    assert said == ["Slurm's node n2 is lost; student 2 moves to n3"]
    assert "n3: student 2 (GPUs 2-3), student 4 (GPUs 0-1)" in sorted_line(launcher)
    assert moved.port not in {place.port for place in places}
    with pytest.raises(CannotPlace) as refused:
        launcher.replace(places[3], quiet)
    assert str(refused.value) == (
        "Slurm's node n2 is lost, and student.tp must fit on one node, got 2 and at most 0 free "
        "GPUs on a node of the allocation; lower it, or ask for more GPUs a node"
    )


def sorted_line(launcher: SlurmLauncher) -> str:
    parts = [part.partition(": ") for part in launcher.line.split("; ")]
    return "; ".join(f"{node}: {', '.join(sorted(what.split(', ')))}" for node, _, what in parts)


def test_nodes_without_gpus(slurm: StandInSlurm):
    for node in slurm.nodes:
        node.gres = ""
    slurm.describe()
    places = SlurmLauncher().reserve([Need(need.key, need.index, 0) for need in NEEDS], quiet)
    assert [place.node for place in places] == ["n1", "n2", "n3", "n1"]
    with pytest.raises(CannotPlace, match=r"teacher.tp must fit on one node, got 2 and at most 0"):
        SlurmLauncher().reserve([Need("teacher", 0, 2)], quiet)


@pytest.mark.parametrize("use", [lambda it: it.host, lambda it: it.reserve(NEEDS, quiet)])
def test_outside_an_allocation(monkeypatch, use: Callable[[SlurmLauncher], NodePlace]):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(CannotPlace, match="needs an allocation, and SLURM_JOB_ID is not set"):
        use(SlurmLauncher())
