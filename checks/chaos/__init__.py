"""Runs on real engines in which processes are killed or stopped at random moments.

    python -m checks chaos [--runs N] [--seed N] [--only WORD]

`opd run` on the arithmetic example, small, with two student servers and one learner rank, or with
one server and two ranks. While it runs, one process after the other gets SIGKILL or SIGSTOP, a
random time after the run has made an update again: a student server or the teacher's (one of its
processes or all of them), a rank of the learner or its torchrun, or the controller, which is then
started again with --auto-resume. Runs of another kind are on a Ray cluster of three nodes and a
head; there the raylet of a node that has processes of the run gets SIGKILL, and all of them end.

What must hold: the run finishes; every admitted sample was trained on or is counted as dropped; no
sample was trained on twice, and no update is missing or listed twice, in the history that survives;
the bound on staleness holds; no process is left; and the student is as good as in the quiet runs of
this check. Three controls, with no restarts allowed, must end with the first fault.

Rows are kept in runs/chaos/rows.jsonl as they come; stopped, it goes on where it was (--runs: how
many runs this time). A row counts only for the code that made it. A fault for which the run was
over too soon is tried again in another run.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checks.chaos.checks import broken_promises
from checks.chaos.machines import machines
from checks.chaos.run import ChaosRun, Shape
from checks.chaos.victims import KINDS, Fault
from harness.case_rows import (
    append_row,
    fingerprint_of,
    kept_rows,
    own_directory,
    run_commits,
    say,
)
from megatron_opd.metrics.summary import commit

ROWS = Path("runs") / "chaos" / "rows.jsonl"
SHAPES = (Shape(student_servers=2, ranks=1), Shape(student_servers=1, ranks=2))
ON_RAY = Shape(student_servers=2, ranks=1, raylets=3)
QUIET = 1
"""Quiet runs of each shape."""
FEWER = {"teacher": 4, "raylet": 3}
WANTED: Mapping[Fault, int] = {kind: FEWER.get(kind.who, 5) for kind in KINDS}
FAULTS_A_RUN = 3
RESTARTED = ("student", "teacher", "learner")
CONTROLS = tuple(fault for fault in KINDS if fault.how == "KILL" and fault.who in RESTARTED)

SIGMAS = 4.0
"""How far a run's accuracy may be from that of the quiet runs, in standard errors."""
Tree = dict[str, Any]


def measure(options: Sequence[str] = (), *, rows: Path = ROWS) -> Tree:
    """Make the runs that are missing; what every kind of fault cost, and which runs failed."""
    arguments = _arguments(options)
    fingerprint = fingerprint_of([str(SHAPES), str(ON_RAY), FAULTS_A_RUN], "checks/chaos")
    names = [*quiet_names(), *map(control_name, CONTROLS), *(f"chaos {i}" for i in range(1000))]
    kept = kept_rows(rows, dict.fromkeys(names, fingerprint))
    with tempfile.TemporaryDirectory(prefix="opd-chaos-") as directory:
        for _ in range(arguments.runs):
            name = next_run(kept, arguments.only)
            if name is None:
                break
            began = time.monotonic()
            row = {"name": name, "fingerprint": fingerprint, "commit": commit()}
            seed = random.Random(f"{arguments.seed} {name}").getrandbits(31)
            row |= run_one(name, seed, kept, own_directory(Path(directory)), arguments.only)
            append_row(rows, row)
            kept[name] = row
            say(f"{name}: {time.monotonic() - began:.0f} s, {row['broken'] or 'held'}")
    return summary(kept, arguments.only)


def quiet_names() -> list[str]:
    """The names of the runs without faults."""
    return [f"quiet {shape.name} {i}" for i in range(QUIET) for shape in SHAPES]


def control_name(kind: Fault) -> str:
    """The name of the run without restarts that this fault must end."""
    return f"control {kind}"


def next_run(kept: Mapping[str, Tree], only: str = "") -> str | None:
    """The name of the next run; None: nothing is missing. Controls come last."""
    for name in quiet_names():
        if name not in kept and only in name:
            return name
    if missing(kept, only):
        return next(name for i in range(1000) if (name := f"chaos {i}") not in kept)
    controls = [name for name in map(control_name, CONTROLS) if only in name]
    return next((name for name in controls if name not in kept), None)


def missing(kept: Mapping[str, Tree], only: str = "") -> Counter[Fault]:
    """How many faults of each kind are still to be made. only: of kinds whose name holds it."""
    made = Counter(fault["kind"] for row in kept.values() for fault in row["faults"])
    wanted = {kind: count for kind, count in WANTED.items() if only in str(kind)}
    left = Counter({kind: count - made[str(kind)] for kind, count in wanted.items()})
    return left & Counter(wanted)


def run_one(name: str, seed: int, kept: Mapping[str, Tree], own: Path, only: str = "") -> Tree:
    """Make one run; its faults, its figures and what did not hold."""
    luck = random.Random(seed)
    kind, _, rest = name.partition(" ")
    # a control has one server of each role: with another one left a run may go on
    shape = SHAPES[int(rest) % 2] if kind == "chaos" else SHAPES[1]
    planned: list[Fault] = []
    if kind == "quiet":
        shape = next(shape for shape in SHAPES if rest.startswith(shape.name))
    elif kind == "control":
        planned = [next(fault for fault in CONTROLS if str(fault) == rest)]
    else:
        wanted = missing(kept, only)
        left = list(wanted.elements())
        here = [fault for fault in left if fault.who != "raylet"]
        if not here:
            shape = ON_RAY
        left = here or left
        luck.shuffle(left)
        # what is longest missing first: the rarest kinds would be left over together otherwise
        left.sort(key=lambda fault: -wanted[fault])
        planned = left[:FAULTS_A_RUN]
        luck.shuffle(planned)
    with machines(shape.raylets) as at:
        found = ChaosRun(shape, at, planned, seed, own, restarts=kind != "control").figures()
    found |= {"shape": shape.name, "seed": seed}
    if kind == "control":
        ended = found["exit_code"] == 1 and len(found["faults"]) == 1
        return found | {"broken": [] if ended else ["a run without restarts went on"]}
    return found | {"broken": broken_promises(found)}


def summary(kept: Mapping[str, Tree], only: str = "") -> Tree:
    """What the check found."""
    quiet = [row for name, row in kept.items() if name.startswith("quiet ")]
    chaotic = [row for name, row in kept.items() if name.startswith("chaos ")]
    failed = {name: row["broken"] for name, row in kept.items() if row["broken"]}
    failed |= unequal(quiet, chaotic)
    by_kind: dict[str, list[Tree]] = defaultdict(list)
    for row in chaotic:
        for fault in row["faults"]:
            by_kind[fault["kind"]].append(fault)
    return {
        "run_commits": run_commits(kept.values()),
        "runs": {"quiet": len(quiet), "chaos": len(chaotic)},
        "faults": sum(map(len, by_kind.values())),
        "missing": missing(kept, only).total(),
        "kinds": {kind: costs(found) for kind, found in sorted(by_kind.items())},
        "quiet": [outcome(row) for row in quiet],
        "chaos": [outcome(row) for row in chaotic],
        "totals": totals(chaotic),
        "controls": {
            name: row["said"] for name, row in kept.items() if name.startswith("control ")
        },
        "failed": failed,
    }


def costs(faults: Sequence[Tree]) -> Tree:
    """What the faults of one kind cost. seconds: from the signal to the next update beyond."""
    seconds = sorted(fault["lost_s"] for fault in faults)
    rolled_back = [fault["rolled_back"] for fault in faults]
    return {
        "faults": len(faults),
        "seconds_lost_median": round(seconds[len(seconds) // 2], 1),
        "seconds_lost_max": round(seconds[-1], 1),
        "updates_rolled_back_mean": round(sum(rolled_back) / len(rolled_back), 1),
        "updates_rolled_back_max": max(rolled_back),
        "processes": sorted({fault["process"] for fault in faults}),
        "example": next((fault["said"] for fault in faults if fault["said"]), []),
    }


def outcome(row: Tree) -> Tree:
    """What a run came to."""
    keys = ("shape", "wall_s", "update_s", "accuracy_pct", "reverse_kl_nats", "staleness_max")
    kinds = [fault["kind"] for fault in row["faults"]]
    return {"faults": kinds} | {key: row[key] for key in keys}


def totals(rows: Sequence[Tree]) -> Tree:
    """Sums over the runs with faults."""
    keys = ("updates", "samples_admitted", "samples_consumed", "samples_dropped")
    return {key: sum(row[key] for row in rows) for key in keys} | {
        "updates_rolled_back": sum(f["rolled_back"] for row in rows for f in row["faults"])
    }


def unequal(quiet: Sequence[Tree], chaotic: Sequence[Tree]) -> Tree:
    """Whether the mean accuracy with faults differs from that without, beyond noise."""
    groups = [
        [row["accuracy_pct"] for row in rows if not row["broken"]] for rows in (quiet, chaotic)
    ]
    if not all(len(group) > 1 for group in groups):
        return {}
    (a, error_a), (b, error_b) = map(mean_and_error, groups)
    if abs(a - b) <= SIGMAS * math.hypot(error_a, error_b):
        return {}
    return {"accuracy": f"{a:.1f} % without faults, {b:.1f} % with faults"}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, from the spread between the runs."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def _arguments(options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m checks chaos")
    parser.add_argument("--runs", type=int, default=1000, help="make at most so many runs now")
    parser.add_argument("--seed", type=int, default=0, help="of the runs and the moments")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="faults, and controls, whose name holds it"
    )
    return parser.parse_args(list(options))
