"""Kills processes of runs that play trajectories, during their turns.

    python -m checks turns_chaos [--faults N] [--only faults|deterministic]

`opd run` on the arithmetic example with a guessing game: three guesses, two student servers, two
data workers, which play the trajectories. While it runs, one process after the other gets SIGKILL,
at random moments at which trajectories with finished turns are under way: a student server (or one
of its processes), a data worker, the process of a trajectory's environment, what forks these, or
the controller, which is started again with --auto-resume. Twenty in all. What must hold: the runs
finish; every admitted sample is trained on once or dropped once, by its number in rollouts.jsonl;
nothing is dropped but trajectories whose own environment was killed; trajectories go on from their
turns; no process is left.

Two further runs are deterministic. One of them is preempted (SIGUSR1), killed (SIGKILL to `opd
run`) and preempted, during turns, and resumed each time. Its checkpoints must hold finished turns,
each trajectory with such must go on from them, and every column that is not of time and the final
weights must be bitwise those of the other run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checks.chaos.run import ChaosRun, Shape
from checks.chaos.victims import Fault
from checks.resume import figures
from checks.sites_chaos.checks import Record
from checks.turns_chaos.interrupted import DETERMINISTIC, go, interrupt
from checks.turns_chaos.promises import (
    broken_by_interruptions,
    broken_by_kills,
    nothing_went_on,
)
from checks.turns_chaos.under_way import (
    DATA_WORKER,
    ENVIRONMENT,
    ENVIRONMENT_HOST,
    DuringTurns,
    game,
)
from harness.case_rows import say
from harness.run_dirs import summary_of

KINDS = ("student", DATA_WORKER, ENVIRONMENT, ENVIRONMENT_HOST, "controller")
"""Which processes are killed, in turn."""
FAULTS, PART = 20, 10
"""Processes that are killed in all, and in one run at most; the runs are made at once."""
SEED = 5
UPDATES, BATCH = 34, 16
SETTINGS = {
    "run.max_steps": UPDATES,
    "buffer.batch_size": BATCH,
    "evaluation.problems": 0,
    "workers.count": 2,
    "workers.restarts": 20,
    # batches end in pairs: of two checkpoints one at least is of trajectories under way
    "checkpoint.every": 1,
    # every sample, and more drops than a host can have trajectories
    "metrics.rollouts": 64,
}


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return what was killed, what did not hold, and how far the deterministic runs agree."""
    parser = argparse.ArgumentParser(prog="python -m checks turns_chaos")
    parser.add_argument("--faults", type=int, default=FAULTS, help="processes that are killed")
    parser.add_argument("--only", choices=("faults", "deterministic"), help="one part")
    arguments = parser.parse_args(options)
    found: dict[str, Any] = {"failed": []}
    with tempfile.TemporaryDirectory(prefix="opd-turns-chaos-") as directory:
        own = Path(directory)
        if arguments.only != "deterministic":
            found |= killed(own, arguments.faults)
        if arguments.only != "faults":
            compared = deterministic(own)
            found["deterministic"] = compared
            found["failed"] = [*found["failed"], *broken_by_interruptions(compared)]
    return found


def killed(own: Path, count: int) -> dict[str, Any]:
    """Make runs in which so many processes are killed."""
    faults = [Fault(KINDS[i % len(KINDS)], "KILL") for i in range(count)]
    parts = [faults[i : i + PART] for i in range(0, count, PART)]
    with ThreadPoolExecutor(len(parts)) as pool:  # the runs mostly wait
        made_now = [pool.submit(hurt, own, i, part) for i, part in enumerate(parts)]
        runs = [run.result() for run in made_now]
    made = [fault for run in runs for fault in run["faults"]]
    failed = [f"run {i}: {problem}" for i, run in enumerate(runs) for problem in run["broken"]]
    if any(fault.who == "controller" for fault in faults):
        failed += nothing_went_on(runs)
    return {
        "settings": SETTINGS,
        "killed": Counter(fault["kind"] for fault in made),
        "trajectories_with_turns_at_a_kill": [fault["with_turns"] for fault in made],
        "runs": runs,
        "failed": failed,
    }


def hurt(root: Path, number: int, planned: list[Fault]) -> dict[str, Any]:
    """Make one run in which these processes are killed."""
    own = root / f"run-{number}"
    own.mkdir()
    record = own / "turns"
    shape = Shape(student_servers=2, ranks=1)
    more = SETTINGS | game(record)
    run = ChaosRun(shape, DuringTurns(record), planned, SEED + number, own, more=more)
    found = run.figures()
    broken = broken_by_kills(found, planned, run.run_dir, UPDATES, BATCH)
    summary = summary_of(run.run_dir)
    keys = ("samples_dropped", "trajectories_resumed", "trajectories_begun_anew")
    found |= {key: summary.get(key) for key in keys}
    dropped = Record.read(run.run_dir).dropped
    found["dropped_after_updates"] = Counter(row["update"] for row in dropped)
    del found["rows"]
    say(f"{own.name}: {found['wall_s']:.0f} s, {broken or 'held'}")
    return found | {"broken": broken}


def deterministic(own: Path) -> dict[str, Any]:
    """Make a run that is left alone and one that is interrupted; how far they agree."""
    whole, interrupted = own / "whole", own / "interrupted"
    go(whole)
    say("whole: done")
    found = interrupt(interrupted)
    say("interrupted: done")
    return {"settings": DETERMINISTIC, **found, **figures(whole, interrupted)}
