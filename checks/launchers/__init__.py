"""One job through every cluster.type, on this machine.

    python -m checks launchers [--steps 60] [--only WORD] [--limit N]

The arithmetic example, whose only difference is what starts its processes: `opd run` itself (twice:
the second run says how far two runs differ anyway), a Ray cluster of one raylet and of three, a
Slurm of three nodes (slurm-wlm and munge must be installed), and processes that join from
elsewhere. Each is judged by the run's own summary.

On Ray and Slurm also with two data workers: whole, with a worker killed, with both killed and none
started again, and with the run told to end by Ctrl-C; looked at from outside (watched.py).

What it cannot say: the nodes are processes on one machine and have no GPU; nothing is timed that
would tell a real cluster's cost.

Rows are kept in runs/launchers/rows.jsonl; stopped, it goes on where it was. A row counts only for
the code that made it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checks.launchers.kinds import KINDS, Job
from checks.launchers.watched import FACTS, as_meant
from harness.case_rows import case_parser, fingerprint_of, run_commits, run_missing
from harness.run_dirs import summary_of
from harness.tree import ROOT

ROWS = Path("runs") / "launchers" / "rows.jsonl"
KEYS = (
    "status",
    "updates",
    "samples_consumed",
    "samples_dropped",
    "staleness_max_versions",
    "student_accuracy_before_pct",
    "student_accuracy_after_pct",
    "probs_diff_max",
    "servers_restarted",
    "learner_restarts",
    "data_workers_lost",
)
Tree = dict[str, Any]


def measure(options: Sequence[str] = (), *, rows: Path = ROWS) -> Tree:
    """Run what is missing; every kind's figures, and which of them failed."""
    parser = case_parser("python -m checks launchers")
    parser.add_argument("--steps", type=int, default=60)
    parsed = parser.parse_args(list(options))
    chosen = [name for name in KINDS if parsed.only in name]
    prints = {name: fingerprint_of([name, parsed.steps], "checks/launchers") for name in chosen}
    kept = run_missing(
        prints, lambda name: {"figures": _run(name, parsed.steps)}, rows, parsed.limit
    )
    done = {name: row["figures"] for name, row in kept.items()}
    return {
        "run_commits": run_commits(kept.values()),
        "steps": parsed.steps,
        "missing": [name for name in chosen if name not in kept],
        "accuracy_after_pct": {n: f.get("student_accuracy_after_pct") for n, f in done.items()},
        "kinds": done,
        "failed": [name for name, f in done.items() if not as_meant(f)],
    }


def _run(name: str, steps: int) -> Tree:
    """Run one kind in a process of its own: Ray reads its environment when it is imported."""
    with tempfile.TemporaryDirectory(prefix="opd-launch-") as directory:
        command = [sys.executable, "-m", "checks.launchers", name, str(steps), directory]
        began_s = time.monotonic()
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        figures: Tree = {"seconds": time.monotonic() - began_s, "exit_code": done.returncode}
        found = summary_of(Path(directory) / "run")
        facts = Path(directory) / FACTS
        if facts.exists():
            figures["watched"] = json.loads(facts.read_text(encoding="utf-8"))
        said = (done.stdout + done.stderr).splitlines()
        if not found:
            return {"status": "no summary", "said": said[-20:]} | figures
        figures["said"] = [line for line in said if line.startswith("error:")]
        lines = [line for line in done.stdout.splitlines() if line.startswith("nodes: ")]
        return {key: found.get(key) for key in KEYS} | {"placed": lines} | figures


def main() -> int:
    """Run one kind: NAME STEPS DIRECTORY."""
    name, steps, directory = sys.argv[1:]
    return KINDS[name](Job(Path(directory), int(steps)))
