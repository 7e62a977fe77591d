"""Finds the processes of a run, and sends one of them a signal."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault. how: KILL or STOP.

    who: student, teacher, learner, controller, or what the run's Machines know besides.
    """

    who: str
    how: str

    def __str__(self) -> str:
        return f"{self.who} {'killed' if self.how == 'KILL' else 'stopped'}"


# a stopped controller comes back only by a kill from outside, which is a killed one
KINDS = (
    Fault("student", "KILL"),
    Fault("student", "STOP"),
    Fault("teacher", "KILL"),
    Fault("teacher", "STOP"),
    Fault("learner", "KILL"),
    Fault("learner", "STOP"),
    Fault("controller", "KILL"),
    Fault("raylet", "KILL"),
)

STOPPED = ("student server", "teacher server", "learner rank")
"""What SIGSTOP is sent to: a server with all of its processes, or a rank."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A process to be hurt, with others that share its fate. name: what it is, for the reader.

    doing: figures of what it was busy with.
    """

    name: str
    pids: tuple[int, ...]
    doing: Mapping[str, int] = field(default_factory=dict[str, int])

    def hurt(self, how: str) -> None:
        """Send the signal to all of them; those that are gone already are."""
        for pid in self.pids:
            try:
                os.kill(pid, signal.Signals[f"SIG{how}"])
            except ProcessLookupError:
                continue


def find(controller: int, fault: Fault, luck: random.Random) -> Victim | None:
    """Choose what a fault hurts; None: there is no such process now, or it is only starting."""
    if fault.who == "controller":
        return Victim("controller", (controller,))
    alive = [process for process in children(controller) if command(process)]
    choices = learner_of(alive) if fault.who == "learner" else server_of(alive, fault.who, luck)
    if fault.how == "STOP":  # as a machine that hangs; torchrun only waits for its ranks
        choices = [choice for choice in choices if choice.name in STOPPED]
    return luck.choice(choices) if choices else None


def children(pid: int) -> list[psutil.Process]:
    """Every process below it."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command(process: psutil.Process) -> str:
    """Its command line; empty for one that has ended."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.Error:
        return ""


def server_of(processes: Sequence[psutil.Process], role: str, luck: random.Random) -> list[Victim]:
    """One of the role's servers: as a whole, or one of its workers."""
    path = f"examples/arithmetic/{role} "
    mains = [
        p for p in processes if "sglang_bridge.server" in (said := command(p)) and path in said
    ]
    up = [main for main in mains if len(workers(main)) > 1]
    if not up:
        return []
    main = luck.choice(up)
    everything = tuple(p.pid for p in (main, *main.children(recursive=True)))
    whole = Victim(f"{role} server", everything)
    parts = [Victim(f"{role} {name}", (p.pid,)) for p in workers(main) if (name := kind_of(p))]
    return [whole, *parts]


def workers(main: psutil.Process) -> list[psutil.Process]:
    """The named workers of a server; they are there once it is nearly up."""
    try:
        return [child for child in main.children() if kind_of(child)]
    except psutil.Error:
        return []


def kind_of(process: psutil.Process) -> str:
    """What SGLang calls a worker: scheduler, detokenizer; empty for anything else."""
    try:
        name = process.name()
    except psutil.Error:
        return ""
    return name.removeprefix("sglang::").split("_")[0] if name.startswith("sglang::") else ""


def learner_of(processes: Sequence[psutil.Process]) -> list[Victim]:
    """Every rank of the learner, and its torchrun, which a world of one rank lacks."""
    world = [p for p in processes if "megatron_opd.learner" in command(p)]
    roots = [p for p in world if "megatron_opd.learner.torchrun" in command(p)]
    ranks = [p for p in world if p not in roots]
    if not ranks:  # torchrun is about to start them
        return []
    found = [Victim("learner rank", (rank.pid,)) for rank in ranks]
    return [*found, *(Victim("torchrun", (root.pid,)) for root in roots)]
