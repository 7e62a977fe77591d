"""A deterministic run that is interrupted during turns, and resumed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from checks.chaos.run import CONFIG, LEFT_BEHIND_S
from checks.chaos.victims import Fault, children
from checks.turns_chaos.under_way import DuringTurns, game
from harness.run_dirs import summary_of, updates_of
from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.controller.snapshot_codec import decode_state
from megatron_opd.run.checkpoints import CONTROLLER

DETERMINISTIC = {
    "run.deterministic": "true",
    "schedule.type": "controlled",
    "run.max_steps": 6,
    "buffer.batch_size": 16,
    "workers.count": 2,
    "evaluation.problems": 0,
    "metrics.tensorboard": "false",
    # checkpoints are written, and only where the run is preempted
    "checkpoint.every": 100,
    "checkpoint.every_minutes": 0,
}
INTERRUPTED = ((1, signal.SIGUSR1), (3, signal.SIGKILL), (4, signal.SIGUSR1))
"""After how many updates `opd run` gets which signal. The killed one goes back to the first
checkpoint, whose turns it had gone on from before."""
LIMIT_S = 900.0
POLL_S = 0.02
Tree = dict[str, Any]


def go(run_dir: Path) -> None:
    """Run to the end. RuntimeError: it fails, or takes too long."""
    process = start(run_dir)
    wait_until(process, run_dir, lambda: process.poll() is not None)
    if process.returncode != 0:
        raise RuntimeError(f"opd run ended with {process.returncode}:\n{end_of_log(run_dir)}")


def interrupt(run_dir: Path) -> Tree:
    """Make the run with its interruptions; what its checkpoints held and what went on from them.

    RuntimeError: it fails, or takes too long.
    """
    interruptions: list[Tree] = []
    turns = DuringTurns(record_of(run_dir))
    for updates, number in INTERRUPTED:
        process = start(run_dir)
        during = _Moment(run_dir, updates, turns, process.pid)
        wait_until(process, run_dir, during)
        if process.poll() is not None:
            raise RuntimeError(f"opd run ended early:\n{end_of_log(run_dir)}")
        below = children(process.pid)
        process.send_signal(number)
        wait_until(process, run_dir, lambda process=process: process.poll() is not None)
        left = psutil.wait_procs(below, timeout=LEFT_BEHIND_S)[1]
        told = {"signal": number.name, "after_updates": updates, "at_hand": during.found}
        told |= {"exit_code": process.returncode, "processes_left": len(left)}
        interruptions.append(told | what_is_kept(run_dir))
    go(run_dir)
    return {
        "interruptions": interruptions,
        "resumed_at_updates": summary_of(run_dir)["resumed_at_updates"],
        "at_the_end": figures_of(run_dir),
    }


class _Moment:
    """Tells whether a run has made so many updates and has finished turns under way."""

    def __init__(self, run_dir: Path, updates: int, turns: DuringTurns, pid: int) -> None:
        self._run_dir, self._updates, self._turns, self._pid = run_dir, updates, turns, pid
        self.found: Tree = {}

    def __call__(self) -> bool:
        if len(updates_of(self._run_dir)) < self._updates:
            return False
        victim = self._turns.find(self._pid, Fault("controller", "KILL"), random.Random(0))
        self.found = dict(victim.doing) if victim else {}
        return victim is not None


def what_is_kept(run_dir: Path) -> Tree:
    """Return what the newest checkpoint has of the line, beside what the last process summed up."""
    dirs = StepDirs(run_dir / "checkpoints")
    newest = dirs.complete()[-1]
    state = decode_state((dirs.path(newest) / CONTROLLER).read_bytes())
    return {"checkpoint": {"updates": newest, **kept_turns(state)}, **figures_of(run_dir)}


def kept_turns(state: ControllerState) -> dict[str, int]:
    """Return how many samples a state holds, and of which trajectories it has finished turns."""
    turns = [len(member.turns) for member in state.line if member.turns]
    return {
        "admitted": state.admitted,
        "trained": state.consumed,
        "dropped": sum(state.dropped.values()),
        "in_line": len(state.line),
        "with_turns": len(turns),
        "turns": sum(turns),
    }


def figures_of(run_dir: Path) -> Tree:
    """Return what the last process that wrote a summary has counted."""
    keys = ("samples_admitted", "samples_consumed", "samples_dropped", "samples_in_flight")
    keys += ("trajectories_resumed", "trajectories_begun_anew")
    summary = summary_of(run_dir)
    return {key: summary.get(key) for key in keys}


def record_of(run_dir: Path) -> Path:
    """Return where the games of a run leave how far they are."""
    return run_dir.with_suffix(".turns")


def start(run_dir: Path) -> subprocess.Popen[bytes]:
    """Start `opd run`; what it says goes to a file beside its directory."""
    settings = DETERMINISTIC | game(record_of(run_dir)) | {"run.dir": run_dir}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "megatron_opd", "run", CONFIG, "--auto-resume", *sets]
    with run_dir.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def wait_until(
    process: subprocess.Popen[bytes], run_dir: Path, happened: Callable[[], bool]
) -> None:
    """Wait for it, or for the end of the process. RuntimeError: neither comes."""
    deadline_s = time.monotonic() + LIMIT_S
    while not happened() and process.poll() is None:
        if time.monotonic() > deadline_s:
            process.kill()
            raise RuntimeError(f"nothing for {LIMIT_S:g} s:\n{end_of_log(run_dir)}")
        time.sleep(POLL_S)


def end_of_log(run_dir: Path) -> str:
    """Return the end of what `opd run` has said."""
    return run_dir.with_suffix(".log").read_text(encoding="utf-8", errors="replace")[-2000:]
