"""A real Ray cluster of three raylets: two nodes of two made-up GPUs, and the driver's without."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from checks.raylets import RAYLET
from checks.raylets import ray_cluster as started_cluster
from megatron_opd.config.ray import RayConfig
from megatron_opd.launch import ray_cluster
from megatron_opd.launch.launcher import CannotPlace, Need, NodePlace, Process, ProcessSpec
from megatron_opd.launch.ray_cluster import RayLauncher
from megatron_opd.launch.ray_process import LOST
from tests.support.paths import ROOT
from tests.support.trees import STUBBORN, pids_in, wait_gone

SHOWN = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "WORD", "OMP_NUM_THREADS"
# ... and the signals that it would not get
SHOW = (
    f"import os, signal; print(*(os.environ.get(name) for name in {SHOWN}), "
    "signal.pthread_sigmask(signal.SIG_BLOCK, []), sep='|', flush=True)"
)
WAIT = "; import time; time.sleep(600)"
TWO_GPUS, ONE_GPU = Need("teacher", 0, 2), Need("student", 0, 1)

# Holds a process on another node until it is killed.
DRIVER = """
import os, sys, time
from pathlib import Path
from megatron_opd.config.ray import RayConfig
from megatron_opd.launch.launcher import Need, ProcessSpec
from megatron_opd.launch.ray_cluster import RayLauncher
address, log, *arguments = sys.argv[1:]
launcher = RayLauncher(RayConfig(address=address))
(place,) = launcher.reserve([Need("student", 0, 1)], print)
launcher.process(ProcessSpec("a tree", tuple(arguments), {}, Path(log)), place).start()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with started_cluster({}, {"num_gpus": 2}, {"num_gpus": 2}) as cluster:
        yield cluster


@pytest.fixture
def launcher(cluster: Any) -> Iterator[RayLauncher]:
    launcher = RayLauncher(RayConfig(address=cluster.address))
    yield launcher
    launcher.close()
    launcher.close()


def started(launcher: RayLauncher, place: NodePlace, log: Path, *arguments: str) -> Process:
    spec = ProcessSpec(log.stem, arguments, {"WORD": "secret"}, log)
    process = launcher.process(spec, place)
    process.start()
    return process


def until(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def raylet_of(cluster: Any, place: NodePlace) -> Any:
    """The made-up machine of a place, which is named like `127.0.0.1 (1c604a0f)`."""
    (node,) = (node for node in cluster.worker_nodes if node.node_id[:8] in place.node)
    return node


def silent(line: str) -> None:
    pytest.fail(f"nothing is to be said: {line}")


def test_every_process_has_its_place_its_gpus_and_its_log(launcher: RayLauncher, tmp_path: Path):
    needs = [
        Need("learner", 0, 1),
        Need("student", 0, 0),
        Need("teacher", 0, 2),
        Need("learner", 1, 1),
    ]
    places = launcher.reserve(needs, silent)
    assert [place.need for place in places] == needs
    assert {place.host for place in places} == {launcher.host} == {"127.0.0.1"}
    assert all(place.port > 1024 for place in places)
    first, _, teacher, second = places
    assert first.node == second.node != teacher.node, "the learner together, the teacher apart"

    logs = [tmp_path / f"{index}.log" for index in range(4)]
    running = [
        started(launcher, place, log, "-c", SHOW + WAIT)
        for place, log in zip(places, logs, strict=True)
    ]
    until(lambda: all(log.read_text().endswith("\n") for log in logs))
    assert [process.exit_code() for process in running] == [None] * 4
    seen = [log.read_text().strip().split("|") for log in logs]
    assert [gpus for gpus, *_ in seen] == ["0", "", "0,1", "1"]
    threads = str(os.environ.get("OMP_NUM_THREADS"))  # Ray's own choice is not passed on
    assert {tuple(rest) for _, *rest in seen} == {("PCI_BUS_ID", "secret", threads, "set()")}
    for process in running:
        process.stop(5.0)
    assert [process.exit_code() for process in running] == [-signal.SIGTERM] * 4


def test_a_process_that_ends_tells_its_code_and_all_of_its_output(
    launcher: RayLauncher, tmp_path: Path
):
    (place,) = launcher.reserve([ONE_GPU], silent)
    code = "import sys; print('x' * 3_000_000); sys.exit('the end')"
    process = started(launcher, place, tmp_path / "log", "-c", code)
    until(lambda: process.exit_code() is not None)
    assert process.exit_code() == 1
    assert (tmp_path / "log").read_text() == "x" * 3_000_000 + "\nthe end\n"
    assert process.cause() is None
    assert launcher.replace(place, silent) == place
    again = started(launcher, place, tmp_path / "log", "-c", "print('again')")
    until(lambda: again.exit_code() is not None)
    assert (again.exit_code(), (tmp_path / "log").read_text()) == (0, "again\n")


def test_what_cannot_be_started_is_one_line(launcher: RayLauncher, tmp_path: Path):
    (place,) = launcher.reserve([ONE_GPU], silent)
    with pytest.raises(RuntimeError) as error:
        started(launcher, place, tmp_path / "long.log", "-c", "x" * 3_000_000)
    assert str(error.value) == "long: [Errno 7] Argument list too long: " + repr(sys.executable)


def test_stop_ends_the_whole_tree(launcher: RayLauncher, tmp_path: Path):
    (place,) = launcher.reserve([ONE_GPU], silent)
    process = started(launcher, place, tmp_path / "log", "-c", STUBBORN, str(tmp_path))
    pids = pids_in(tmp_path, 3)
    process.stop(0.3)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert process.exit_code() == -signal.SIGKILL
    process.stop(0.3)


def test_the_tree_ends_with_a_driver_that_is_killed(cluster: Any, tmp_path: Path):
    command = [sys.executable, "-c", DRIVER, cluster.address, str(tmp_path / "log")]
    command += ["-c", STUBBORN, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT) as driver:
        try:
            pids = pids_in(tmp_path, 3)
        finally:
            driver.send_signal(signal.SIGKILL)
    wait_gone(pids)


def test_what_there_will_never_be_room_for_is_one_line(launcher: RayLauncher):
    with pytest.raises(CannotPlace) as error:
        launcher.reserve([Need("teacher", 0, 3)], silent)
    assert str(error.value) == (
        "teacher.tp must fit on one node of the Ray cluster, got 3 GPUs for teacher server 0, and "
        "its largest node has 2; lower it, or add nodes, or set cluster.ray.autoscaling: true if "
        "the cluster adds them by itself"
    )


def test_it_says_what_is_missing_until_it_is_closed(cluster: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_cluster, "SAY_EVERY_S", 0.5)
    launcher = RayLauncher(RayConfig(address=cluster.address, autoscaling=True))
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "student server 0" not in line:  # it is there
            threading.Thread(target=launcher.close).start()

    with pytest.raises(CannotPlace, match="was left while the run waited"):
        launcher.reserve([Need("student", 0, 1), Need("student", 1, 3)], say)
    launcher.close()
    assert said[-1].startswith(
        "waiting for room in the Ray cluster: student server 1 (3 GPUs and 0.5 CPUs); free on its "
        "3 nodes: "
    )


def test_a_killed_actor_is_told_from_a_lost_node(launcher: RayLauncher, tmp_path: Path):
    (place,) = launcher.reserve([ONE_GPU], silent)
    process = started(launcher, place, tmp_path / "log", "-c", STUBBORN, str(tmp_path))
    pids = pids_in(tmp_path, 3)
    (actor,) = (
        worker
        for raylet in psutil.Process().children()
        if "raylet" in raylet.name()
        for worker in raylet.children()
        if "NodeOwner" in worker.name()
    )
    actor.kill()
    wait_gone(pids)
    until(lambda: process.exit_code() is not None)
    assert process.exit_code() == LOST
    assert str(process.cause()).startswith(f"Ray ended its actor on node {place.node}: ")
    assert launcher.replace(place, silent) == place
    again = started(launcher, place, tmp_path / "log", "-c", SHOW)
    until(lambda: again.exit_code() is not None)
    assert again.exit_code() == 0


def test_a_lost_node_ends_its_processes_and_others_take_its_place(
    cluster: Any, launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    needs = Need("learner", 0, 1), Need("teacher", 0, 1), Need("teacher", 1, 1)
    kept, lost, lost_too = launcher.reserve(needs, silent)
    assert kept.node != lost.node == lost_too.node
    staying = started(launcher, kept, tmp_path / "kept", "-c", SHOW + WAIT)
    process = started(launcher, lost, tmp_path / "lost", "-c", STUBBORN, str(tmp_path))
    pids = pids_in(tmp_path, 3)
    raylet = raylet_of(cluster, lost)
    raylet.kill_raylet()
    wait_gone(pids)
    until(lambda: process.exit_code() is not None)
    assert process.exit_code() == LOST
    cause = f"node {lost.node} of the Ray cluster was lost"
    assert process.cause() == cause
    assert (tmp_path / "lost").read_text() == f"lost: {cause}\n"
    process.stop(1.0)
    cluster.remove_node(raylet, allow_graceful=False)

    monkeypatch.setattr(ray_cluster, "SAY_EVERY_S", 0.5)
    # one finds room beside the learner; the other waits until a node joins
    said: list[str] = []

    def say(line: str) -> None:
        if not said:
            cluster.add_node(wait=False, num_gpus=2, **RAYLET)
        said.append(line)

    found = [launcher.replace(place, say) for place in (lost, lost_too)]
    assert [place.need for place in found] == [lost.need, lost_too.need]
    assert kept.node in {place.node for place in found}
    assert not {lost.node, found[0].node} & {found[1].node}
    assert "(1 GPU and 0.5 CPUs); free on its 2 nodes: 0 GPUs" in said[0]
    for place in found:
        again = started(launcher, place, tmp_path / "again", "-c", SHOW)
        until(lambda again=again: again.exit_code() is not None)
        assert again.exit_code() == 0
        assert (tmp_path / "again").read_text().startswith(("0|", "1|"))
    assert staying.exit_code() is None
    staying.stop(5.0)
    assert staying.exit_code() == -signal.SIGTERM
