"""The arithmetic example in a Slurm job, by the job script of the cluster examples."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import psutil

from checks.slurm.here import OneMachine, write_program
from harness.run_dirs import summary_of
from harness.tree import ROOT

JOB = "examples/cluster/job.slurm"
RUN_S = 900.0
KEPT = (
    *("status", "cause", "updates", "samples_consumed", "samples_dropped", "wall_s"),
    *("student_accuracy_before_pct", "student_accuracy_after_pct", "staleness_max_versions"),
    *("servers_restarted", "samples_readmitted", "learner_restarts"),
)
SAID = ("Slurm", "nodes:", "everything is up", "student ", "teacher:", "error:")


class Job:
    """One run in a job on all nodes."""

    def __init__(self, slurm: OneMachine, name: str, *settings: str) -> None:
        self.slurm, self.folder = slurm, slurm.folder / name
        self.folder.mkdir()
        opd = self.folder / "bin" / "opd"
        write_program(opd, f'#!/bin/sh\nexec {sys.executable} -m megatron_opd "$@"\n')
        words = [
            word for one in (f"run.dir={self.folder}/run", *settings) for word in ("--set", one)
        ]
        count = len(slurm.names)
        options = [f"--nodes={count}", f"--gpus-per-node={slurm.gpus}", "--cpus-per-task=8"]
        self.job = slurm.submit(
            *options,
            f"--chdir={ROOT}",
            f"--output={self.folder}/job.log",
            JOB,
            "examples/arithmetic/demo.yaml",
            *words,
            PATH=f"{opd.parent}:{slurm.environment['PATH']}",
        )

    def lines(self) -> list[str]:
        """What the job has printed."""
        log = self.folder / "job.log"
        return log.read_text().splitlines() if log.exists() else []

    def until_update(self, number: int) -> bool:
        """Wait for an update; False: the job ended first."""
        while not any(line.startswith(f"update {number}/") for line in self.lines()):
            if self.slurm.state(self.job) not in ("PENDING", "RUNNING"):
                return False
            time.sleep(0.2)
        return True

    def ended(self) -> dict[str, Any]:
        """Wait for its end; the run's figures, and what is left of its processes."""
        try:
            state = self.slurm.ended(self.job, RUN_S)
        finally:
            self.slurm.ask("scancel", self.job)
        summary = summary_of(self.folder / "run")
        found = {key: summary[key] for key in KEPT if key in summary}
        found["state"], found["processes_left"] = state, len(self.processes())
        found["said"] = [line for line in self.lines() if line.startswith(SAID)]
        found["failed"] = state != "COMPLETED" or summary.get("status") != "finished"
        found["failed"] = found["failed"] or found["processes_left"] > 0
        return found

    def processes(self, *words: str) -> list[psutil.Process]:
        """The processes of the run that have these words on their command lines."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            here = any(f"{self.folder}/run" in word for word in line)
            if here and all(word in line for word in words):
                found.append(process)
        return found


def demo(slurm: OneMachine) -> dict[str, Any]:
    """The whole of `make demo`, each process on a node of its own."""
    return Job(slurm, "demo").ended()


def recovery(slurm: OneMachine) -> dict[str, Any]:
    """A short run with a learner of two nodes, of which a student server is killed.

    With one GPU a node each process has a node of its own.
    """
    job = Job(
        slurm,
        "recovery",
        "run.max_steps=40",
        "evaluation.problems=16",
        "student.servers=2",
        "learner.parallel.dp=2",
        "cluster.ranks_per_node=1",
    )
    killed: list[str] = []
    if job.until_update(2):
        for process in job.processes("serve", "student", "0"):
            if "megatron_opd.launch.step" not in process.info["cmdline"]:
                killed.append(" ".join(process.info["cmdline"][2:5]))
                os.kill(process.pid, 9)
    found = job.ended()
    found["failed"] = found["failed"] or found.get("servers_restarted") != 1
    return {"killed": killed, **found}


def preempted(slurm: OneMachine) -> dict[str, Any]:
    """A short run that is told to end, as before its time is over, and that Slurm starts again."""
    steps = 40
    job = Job(slurm, "preempted", f"run.max_steps={steps}", "evaluation.problems=16")
    if job.until_update(steps // 2):
        slurm.ask("scancel", "--batch", "--signal=USR1", job.job)
    found = job.ended()
    rows = (job.folder / "run" / "metrics.jsonl").read_text().splitlines()
    updates = [json.loads(row)["update"] for row in rows]
    told = [line for line in job.lines() if line.startswith(("preempted:", "continuing from "))]
    as_meant = len(told) == 2 and updates == list(range(steps))
    return found | {"told": told, "failed": found["failed"] or not as_meant}
