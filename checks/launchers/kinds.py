"""The ways in which the processes of one job are started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from checks.launchers.watched import Watched
from checks.raylets import ray_cluster
from checks.slurm.here import OneMachine
from harness.tree import ROOT
from megatron_opd.learner.torchrun import LOOPBACK
from sglang_bridge.ports import free_port

DEMO = "examples/arithmetic/demo.yaml"
JOB_S = 1200.0


@dataclass(frozen=True)
class Job:
    """The example with so many updates, in `directory`/run.

    settings: of its configuration, besides. watched: looks at it from outside.
    """

    directory: Path
    steps: int
    settings: tuple[str, ...] = ()
    watched: Watched | None = None

    def begun(self, folder: Path) -> None:
        """Note that it begins, on a cluster whose own files are in `folder`."""
        if self.watched is not None:
            self.watched.begin(folder)

    def ended(self) -> None:
        """Note that it has ended; the cluster is still there."""
        if self.watched is not None:
            self.watched.end()

    def command(self, verb: str, *settings: str, words: tuple[str, ...] = ()) -> list[str]:
        """Return the command line of an `opd` verb."""
        given = (f"run.dir={self.directory}/run", f"run.max_steps={self.steps}")
        given += (*self.settings, *settings)
        sets = [part for setting in given for part in ("--set", setting)]
        return [sys.executable, "-m", "megatron_opd", verb, *words, DEMO, *sets]


def local(job: Job) -> int:
    """`opd run` starts everything itself."""
    return subprocess.run(job.command("run"), cwd=ROOT).returncode


def ray(job: Job, nodes: int) -> int:
    """On a Ray cluster of so many raylets."""
    with ray_cluster({}, *[{}] * (nodes - 1)) as cluster:
        where = ("cluster.type=ray", f"cluster.ray.address={cluster.address}")
        job.begun(Path(os.environ["RAY_TMPDIR"]))
        try:
            return subprocess.run(job.command("run", *where), cwd=ROOT).returncode
        finally:
            job.ended()


def slurm(job: Job, nodes: int = 3) -> int:
    """In a job on a Slurm of so many nodes, without GPUs."""
    # a directory of its own: others must be able to reach munge's socket
    with TemporaryDirectory() as own, OneMachine(Path(own), nodes, gpus=1) as system:
        script = job.directory / "job.sh"
        command = " ".join(job.command("run", "cluster.type=slurm"))
        script.write_text(f"#!/bin/bash\nexec {command}\n", encoding="utf-8")
        log = job.directory / "job.log"
        wanted = (f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=4")
        where = (f"--output={log}", f"--chdir={ROOT}")
        job.begun(Path(own))
        try:
            state = system.ended(system.submit(*wanted, *where, script), JOB_S)
        finally:
            job.ended()
        sys.stdout.write(log.read_text(encoding="utf-8"))
        return int(state != "COMPLETED")


def external(job: Job) -> int:
    """Servers and learner are started beside `opd control`, and join."""
    port, servers = free_port(), {role: free_port() for role in ("student", "teacher")}
    settings = [f"learner.listen_port={port}"]
    for role, at in servers.items():
        settings += [f"{role}.base_port={at}", f"{role}.urls=[http://{LOOPBACK}:{at}]"]
    learner = [sys.executable, "-m", "megatron_opd.learner.torchrun", "--nproc-per-node=1"]
    learner += ["-m", "megatron_opd.learner", DEMO, "--controller", f"tcp://{LOOPBACK}:{port}"]
    sets = job.command("run", *settings)
    commands = [job.command("serve", *settings, words=(role,)) for role in servers]
    commands.append(learner + sets[sets.index("--set") :])
    parts = [subprocess.Popen(command, cwd=ROOT, start_new_session=True) for command in commands]
    try:
        return subprocess.run(job.command("control", *settings), cwd=ROOT).returncode
    finally:
        for part in parts:
            part.terminate()
        for part in parts:
            part.wait(60)


def with_workers(
    kind: Callable[[Job], int], fault: str = "", *settings: str
) -> Callable[[Job], int]:
    """The same with two data workers. fault: what happens to it, see watched.FAULTS."""

    def run(job: Job) -> int:
        watched = Watched(job.directory, fault)
        own = replace(job, settings=("workers.count=2", *settings), watched=watched)
        return kind(own)

    return run


def _three_raylets(job: Job) -> int:
    return ray(job, 3)


KINDS: dict[str, Callable[[Job], int]] = {
    "local": local,
    "local_again": local,
    "ray_1_raylet": lambda job: ray(job, 1),
    "ray_3_raylets": _three_raylets,
    "slurm_3_nodes": slurm,
    "external": external,
}
for _name, _kind in (("ray", _three_raylets), ("slurm", slurm)):
    KINDS |= {
        f"{_name}_2_workers": with_workers(_kind),
        f"{_name}_2_workers_one_killed": with_workers(_kind, "one killed"),
        f"{_name}_2_workers_all_killed": with_workers(_kind, "all killed", "workers.restarts=0"),
        f"{_name}_2_workers_interrupted": with_workers(_kind, "interrupted"),
    }
