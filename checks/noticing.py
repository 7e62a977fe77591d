"""How long a run takes to say that one of its processes was killed, and what it says.

Each kind of process is killed (SIGKILL) in the middle of a run of its own: of `opd run`, which
started it, and of `opd control`, whose servers and learner were started by hand. Measured is the
time until the program has printed its line and ended.

`python -m checks noticing [--run] [--control] [--learner] ...`: the kinds that hold any of
these words; without one all, about nine minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sglang_bridge.ports import free_port

CONFIG = "examples/arithmetic/demo.yaml"
LIMIT_S = 90.0  # what is not noticed by then is recorded as such
STARTUP_S = 240.0
OPD = [sys.executable, "-m", "megatron_opd"]
SETTINGS = ("run.max_steps=100000", "rollout.max_new_tokens=32")
STAGES = {
    "training": (("evaluation.problems=0",), "update 3"),
    # of about two minutes
    "evaluation": (("evaluation.problems=128", "evaluation.samples=64"), "scores agree"),
}
"""What a run does when a process is killed: settings, and what is printed before."""


class NotStarted(RuntimeError):
    """A scenario's programs did not reach the point at which a process is to be killed."""


@dataclass(frozen=True)
class Started:
    """A process of a scenario and where its output goes."""

    process: subprocess.Popen[bytes]
    log: Path


def start(arguments: Sequence[str], log: Path) -> Started:
    """A program in a process group of its own."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Started(process, log)


def wait_for(condition: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until the condition held; None when it did not."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < limit_s:
        if condition():
            return time.monotonic() - started_s
        time.sleep(0.02)
    return None


def tree(started: Sequence[Started]) -> list[psutil.Process]:
    """Every process below the programs of a scenario, themselves included."""
    found = []
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(each.process.pid)
            found += [root, *root.children(recursive=True)]
    return found


def command_of(process: psutil.Process) -> str:
    """Its command line; empty for one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_server(process: psutil.Process, role: str) -> bool:
    """Whether this is the main process of a role's server (SGLang's workers retitle themselves)."""
    command = command_of(process)
    return "sglang_bridge.server" in command and f"examples/arithmetic/{role}" in command


def find(started: Sequence[Started], victim: str) -> psutil.Process:
    """The process that `victim` names: controller, learner, torchrun, or "ROLE KIND"."""
    processes = tree(started)
    if victim == "controller":
        return psutil.Process(started[-1].process.pid)
    if victim in ("learner", "torchrun"):
        worlds = [p for p in processes if "megatron_opd.learner" in command_of(p)]
        ids = {p.pid for p in worlds}
        (rank,) = [p for p in worlds if not ids & {child.pid for child in p.children()}]
        return rank if victim == "learner" else psutil.Process(rank.ppid())
    role, _, kind = victim.partition(" ")
    (server,) = [p for p in processes if is_server(p, role)]
    if kind == "server":
        return server
    (worker,) = [p for p in server.children() if p.name().startswith(f"sglang::{kind}")]
    return worker


@contextlib.contextmanager
def scenario(kind: str, scratch: Path, stage: str) -> Iterator[list[Started]]:
    """A run in its stride; its last program is the one that must notice."""
    chosen, line = STAGES[stage]
    overrides = [*SETTINGS, *chosen, f"run.dir={scratch / 'run'}"]
    started: list[Started] = []
    try:
        if kind == "control":
            overrides += start_by_hand(overrides, scratch, started)
        verb = [*OPD, kind, CONFIG, *settings(overrides)]
        if kind == "control":
            # the controller says where the learner is to connect
            started.append(start(verb, scratch / "main.log"))
            learner = [sys.executable, "-m", "megatron_opd.learner.torchrun", "--nproc-per-node=1"]
            learner += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m"]
            wait_for(lambda: "--controller" in started[-1].log.read_text(), STARTUP_S)
            address = started[-1].log.read_text().split("--controller ")[1].split()[0]
            # the same settings: run.dir holds no configuration before all have joined
            learner += ["megatron_opd.learner", CONFIG, *settings(overrides)]
            learner += ["--controller", address]
            started.insert(0, start(learner, scratch / "learner.log"))
        else:
            started.append(start(verb, scratch / "main.log"))
        main = started[-1]
        up = wait_for(
            lambda: line in main.log.read_text() or main.process.poll() is not None, STARTUP_S
        )
        if up is None or main.process.poll() is not None:
            raise NotStarted(f"the run did not start: {main.log.read_text()[-800:]}")
        yield started
    finally:
        for process in tree(started):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for each in started:
            each.process.wait()


def start_by_hand(overrides: Sequence[str], scratch: Path, started: list[Started]) -> list[str]:
    """Starts both servers; what the controller needs to find them."""
    addresses = [f"learner.listen_port={free_port()}"]
    for role in ("student", "teacher"):
        port = free_port()
        verb = [*OPD, "serve", role, CONFIG, *settings([*overrides, f"{role}.base_port={port}"])]
        log = scratch / f"{role}.log"
        started.append(start(verb, log))
        if wait_for(lambda log=log: "fired up" in log.read_text(), STARTUP_S) is None:
            raise NotStarted(f"the {role} server did not start: {log.read_text()[-800:]}")
        addresses.append(f"{role}.urls=[http://127.0.0.1:{port}]")
    return addresses


def settings(overrides: Sequence[str]) -> list[str]:
    """As arguments of `opd`."""
    return [word for override in overrides for word in ("--set", override)]


def notice(kind: str, victim: str, noticer: str, stage: str) -> dict[str, Any]:
    """Kills one process of a run; who is to notice, how long it took, and its last line.

    NotStarted: nothing was killed.
    """
    with tempfile.TemporaryDirectory(prefix="opd-noticing-") as directory:
        scratch = Path(directory)
        with scenario(kind, scratch, stage) as started:
            main = started[-1] if noticer == "main" else started[0]
            find(started, victim).send_signal(signal.SIGKILL)
            seconds = wait_for(lambda: main.process.poll() is not None, LIMIT_S)
            lines = main.log.read_text(errors="replace").strip().splitlines()
            said = [line for line in lines if line.startswith("error:")] or lines[-1:]
            return {
                "program": f"opd {kind}" if noticer == "main" else "learner",
                "killed": victim,
                "during": stage,
                "seconds": None if seconds is None else round(seconds, 2),
                "exit_code": main.process.poll(),
                "error_lines": len([line for line in lines if line.startswith("error:")]),
                "said": said[-1].replace(directory, "DIR") if said else "",
            }


RUNS: tuple[tuple[str, str, str, str], ...] = (
    ("run", "student server", "main", "training"),
    ("run", "student scheduler", "main", "training"),
    ("run", "student detokenizer", "main", "training"),
    ("run", "teacher server", "main", "training"),
    ("run", "teacher scheduler", "main", "training"),
    ("run", "teacher detokenizer", "main", "training"),
    ("run", "learner", "main", "training"),
    ("run", "torchrun", "main", "training"),
    ("run", "learner", "main", "evaluation"),
    ("run", "teacher scheduler", "main", "evaluation"),
    ("control", "student server", "main", "training"),
    ("control", "student detokenizer", "main", "training"),
    ("control", "teacher scheduler", "main", "training"),
    ("control", "learner", "main", "training"),
    ("control", "controller", "learner", "training"),
)


def noticed(kind: str, victim: str, noticer: str, stage: str) -> dict[str, Any]:
    """The row of one kind; a scenario that does not start is one too, and the others go on."""
    try:
        return notice(kind, victim, noticer, stage)
    except NotStarted as error:
        failed = {"program": f"opd {kind}", "killed": victim, "during": stage}
        return failed | {"seconds": None, "exit_code": None, "error_lines": 0, "said": str(error)}


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Every kind, or those whose "PROGRAM VICTIM" holds one of the words given."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [
        row
        for row in RUNS
        if not options or any(word.lstrip("-") in f"{row[0]} {row[1]} {row[3]}" for word in options)
    ]
    rows = []
    for row in chosen:
        rows.append(noticed(*row))
        print(rows[-1], file=sys.stderr, flush=True)
    seconds = [row["seconds"] for row in rows]
    return {
        "rows": rows,
        "all_noticed": None not in seconds,
        "seconds_max": max((s for s in seconds if s is not None), default=None),
    }
