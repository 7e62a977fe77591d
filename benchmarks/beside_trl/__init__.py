"""This project beside TRL's DistillationTrainer: one pretrained pair, one machine, in turn.

    python -m benchmarks beside_trl [--updates 8] [--repetitions 3] [--budget-s S]

Each run is one row, kept in benchmarks/results/beside_trl_rows.jsonl as soon as it ends and used
again as long as code and configuration are those that made it: stopped, or given --budget-s, the
next start goes on where it was. TRL gets an environment of its own, build/beside_trl/venv. The
machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.beside_trl.cases import BATCH, CORES, NO_LEARNING, TOKENS, Case, cases
from benchmarks.beside_trl.models import endless_pair
from benchmarks.beside_trl.run import ENVIRONMENT, TRL_ENVIRONMENT, run_case
from benchmarks.beside_trl.summary import summary
from harness.case_rows import append_row, fingerprint_of, kept_rows, own_directory, say
from tools.setup_venv import cpu_torch, create, pinned, read_sources

Tree = dict[str, Any]
ROWS = Path("benchmarks/results/beside_trl_rows.jsonl")
LOCK = Path(__file__).with_name("requirements.lock")
VENV = Path("build/beside_trl/venv")
STAMP = "pins.sha256"


def measure(options: Sequence[str] = ()) -> Tree:
    """Run what no row is kept of, within the budget. options: the command line's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks beside_trl")
    parser.add_argument("--updates", type=int, default=8, help="of each run, 4 of them not timed")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--budget-s", type=float, help="begin no run after so many seconds")
    parser.add_argument("--rows", type=Path, default=ROWS, help="where rows are kept")
    arguments = parser.parse_args(list(options))
    if arguments.updates < 5:
        parser.error(f"--updates must be at least 5, got {arguments.updates}: 4 are not timed")
    started = time.monotonic()
    planned = cases(arguments.updates, arguments.repetitions)
    prints = {case.name: _fingerprint(case) for case in planned}
    rows = kept_rows(arguments.rows, prints)
    missing: list[str] = []
    for case in planned:
        if case.name in rows:
            continue
        spent = time.monotonic() - started
        if arguments.budget_s is not None and spent > arguments.budget_s:
            missing.append(case.name)
            continue
        say(f"{spent:.0f} s: {case.name}")
        rows[case.name] = _row(case, prints[case.name])
        append_row(arguments.rows, rows[case.name])
    done = [rows[case.name] for case in planned if case.name in rows]
    return {
        "batch": {"responses": BATCH, "tokens_of_each": TOKENS},
        "cores": CORES,
        "environment": ENVIRONMENT,
        "environment_of_trl": TRL_ENVIRONMENT,
        "packages_of_trl": LOCK.read_text(encoding="utf-8").split("\n")[2:-1],
        **summary(done),
        "not_run": missing,
        "rows": done,
    }


def _fingerprint(case: Case) -> str:
    environment = ENVIRONMENT | (TRL_ENVIRONMENT if case.system == "trl" else {})
    asked = case.asked() | {"lock": LOCK.read_text(encoding="utf-8"), "environment": environment}
    return fingerprint_of(asked, "benchmarks/beside_trl")


def _row(case: Case, fingerprint: str) -> Tree:
    models, trl = endless_pair(), trl_python()
    scratch = Path("build/beside_trl/runs")
    scratch.mkdir(parents=True, exist_ok=True)
    own = own_directory(scratch)
    load = os.getloadavg()[0]
    found = run_case(case, models, own, trl)
    shutil.rmtree(own)
    return {
        "name": case.name,
        "fingerprint": fingerprint,
        **asdict(case),
        "control": case.learning_rate == NO_LEARNING,
        "load_before": load,
        **found,
    }


def trl_python() -> str:
    """Return the interpreter of TRL's environment, which is made unless it has these pins.

    Raises subprocess.CalledProcessError, or tools.setup_venv.SetupError: a package is not found.
    """
    python, stamp = str(VENV.absolute() / "bin" / "python"), VENV / STAMP
    digest = hashlib.sha256(sys.version.encode() + LOCK.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return python
    create(VENV)
    sources = read_sources(sys.executable)
    # uv of this project's environment: the lock file has none
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--python", python]
    uv += ["--quiet", *sources.uv_options()]
    version = pinned(LOCK, "torch")
    assert version is not None
    os.environ.update(sources.environment())
    subprocess.run([*uv, "--no-deps", "-r", str(LOCK), *cpu_torch(uv, version)], check=True)
    stamp.write_text(digest, encoding="utf-8")
    return python
