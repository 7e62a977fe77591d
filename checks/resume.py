"""The demo killed and resumed, against the demo left alone: every figure of every update.

    python -m checks resume

Runs the demo with `run.deterministic` and checkpoints: once without interruption; once killed
(SIGKILL to `opd run`, whose servers and learner then end by themselves) at several updates and
resumed each time; once with other numbers of requests in flight and two student servers. Compares
metrics.jsonl bitwise in every column that is not of time, and the final checkpoints' bytes. The
control is the demo without `run.deterministic`, run twice. Finished runs under runs/resume are kept
and not made again.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.run_dirs import summary_of
from megatron_opd.cli.commands.compare import read_rows
from megatron_opd.metrics.compare import RunComparison, compare_rows

DEMO = Path("examples/arithmetic/demo.yaml")
OUT = Path("runs/resume")
CHECKPOINTS = {"checkpoint.every": "10", "checkpoint.keep_last": "2"}
DETERMINISTIC = {"run.deterministic": "true", "schedule.type": "controlled", **CHECKPOINTS}
OTHER_FLEET = {"rollout.concurrency": "17", "scoring.concurrency": "9", "student.servers": "2"}
KILLED_AT = (17, 20, 43)  # updates made when the run is killed: between checkpoints, and at one
LIMIT_S = 1800


def measure() -> dict[str, Any]:
    """All runs and what they have in common."""
    whole = run("whole", DETERMINISTIC)
    killed, resumed_at = run_killed("killed", DETERMINISTIC)
    elsewhere = run("elsewhere", DETERMINISTIC | OTHER_FLEET)
    free = [run(name, CHECKPOINTS) for name in ("free-1", "free-2")]
    summaries = {run_dir.name: summary_of(run_dir) for run_dir in (whole, killed, elsewhere, *free)}
    keys = ("student_accuracy_after_pct", "staleness_mean_versions", "train_tokens_per_s")
    return {
        "config": str(DEMO),
        "settings": DETERMINISTIC,
        "runs": {name: {key: found[key] for key in keys} for name, found in summaries.items()},
        "killed_and_resumed": {
            "killed_after_updates": list(KILLED_AT),
            "resumed_at_updates": resumed_at,
            **figures(whole, killed),
        },
        "other_fleet": {"settings": OTHER_FLEET, **figures(whole, elsewhere)},
        "control_not_deterministic": figures(*free),
    }


def figures(a: Path, b: Path) -> dict[str, Any]:
    """How far two runs agree."""
    found = compare_rows(read_rows(a), read_rows(b))
    weights = [(run_dir / "checkpoints/final/model.safetensors").read_bytes() for run_dir in (a, b)]
    return {
        "updates_compared": found.updates,
        "columns_compared": len(found.columns),
        "columns_left_out": list(found.left_out),
        "columns_that_differ": len(found.differences),
        "first_update_that_differs": first_of(found),
        "differences": [
            # JSON has no infinity: a number in one run alone
            asdict(each) | ({"relative": None} if math.isinf(each.relative) else {})
            for each in found.differences
            if each.column in SHOWN
        ],
        "final_weights_equal": weights[0] == weights[1],
    }


SHOWN = ("loss", "grad_norm", "num_ids", "probs_diff_mean")


def first_of(found: RunComparison) -> int | None:
    """The first update in which anything differs."""
    return min((each.first_update for each in found.differences), default=None)


def run(name: str, overrides: dict[str, str]) -> Path:
    """One run to its end."""
    run_dir = OUT / name
    if not summary_of(run_dir):
        process = start(run_dir, overrides, "--overwrite")
        finish(process, run_dir)
    return run_dir


def run_killed(name: str, overrides: dict[str, str]) -> tuple[Path, list[int]]:
    """One run that is killed and resumed; where it went on from."""
    run_dir = OUT / name
    if not summary_of(run_dir):
        option = "--overwrite"
        for updates in KILLED_AT:
            process = start(run_dir, overrides, option)
            kill_after(process, run_dir, updates)
            option = "--resume"
        finish(start(run_dir, overrides, option), run_dir)
    summary = summary_of(run_dir)
    return run_dir, summary["resumed_at_updates"]


def start(run_dir: Path, overrides: dict[str, str], option: str) -> subprocess.Popen[bytes]:
    """`opd run`, its output under the run's name."""
    OUT.mkdir(parents=True, exist_ok=True)
    values = {"run.dir": str(run_dir)} | overrides
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "megatron_opd", "run", str(DEMO), option, *sets]
    print(f"{run_dir.name}: {option}", file=sys.stderr, flush=True)
    with (OUT / f"{run_dir.name}.log").open("ab") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def kill_after(process: subprocess.Popen[bytes], run_dir: Path, updates: int) -> None:
    """SIGKILL once metrics.jsonl has the rows of `updates` updates and a checkpoint is complete."""
    deadline_s = time.monotonic() + LIMIT_S
    metrics = run_dir / "metrics.jsonl"
    while True:
        rows = metrics.read_text().count("\n") if metrics.exists() else 0
        complete = any((run_dir / "checkpoints").glob("step-??????"))
        if rows >= updates and complete:
            break
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"{run_dir.name} ended before {updates} updates; see its log")
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(5)  # its servers and learner notice by themselves


def finish(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Wait for the end of a run."""
    if process.wait(timeout=LIMIT_S) != 0:
        raise SystemExit(f"{run_dir.name} failed; see {OUT / run_dir.name}.log")
