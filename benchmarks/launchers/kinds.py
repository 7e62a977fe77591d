"""The ways in which the processes of one job are started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.raylets import ray_cluster
from benchmarks.slurm.here import OneMachine
from megatron_opd.learner.torchrun import LOOPBACK
from sglang_bridge.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DEMO = "examples/arithmetic/demo.yaml"
JOB_S = 1200.0


@dataclass(frozen=True)
class Job:
    """The example with so many updates, in `directory`/run."""

    directory: Path
    steps: int

    def command(self, verb: str, *settings: str, words: tuple[str, ...] = ()) -> list[str]:
        """Return the command line of an `opd` verb."""
        given = (f"run.dir={self.directory}/run", f"run.max_steps={self.steps}", *settings)
        sets = [part for setting in given for part in ("--set", setting)]
        return [sys.executable, "-m", "megatron_opd", verb, *words, DEMO, *sets]


def local(job: Job) -> int:
    """`opd run` starts everything itself."""
    return subprocess.run(job.command("run"), cwd=ROOT).returncode


def ray(job: Job, nodes: int) -> int:
    """On a Ray cluster of so many raylets."""
    with ray_cluster({}, *[{}] * (nodes - 1)) as cluster:
        where = ("cluster.type=ray", f"cluster.ray.address={cluster.address}")
        return subprocess.run(job.command("run", *where), cwd=ROOT).returncode


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
        state = system.ended(system.submit(*wanted, *where, script), JOB_S)
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


KINDS: dict[str, Callable[[Job], int]] = {
    "local": local,
    "local_again": local,
    "ray_1_raylet": lambda job: ray(job, 1),
    "ray_3_raylets": lambda job: ray(job, 3),
    "slurm_3_nodes": slurm,
    "external": external,
}
