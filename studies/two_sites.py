"""Two sampler sites and a learner's site on one machine, beside the same run at one place.

    python -m studies two_sites [--out DIR]

Runs examples/sites/two_sites.yaml as three processes (`opd run`, `opd site near`, `opd site far`),
with HeteroRL's log-normal delays of 60 to 1,800 s scaled 1:60; then examples/arithmetic/demo.yaml,
the same task with student servers beside the learner and no delays. Both make as many updates of as
many samples. The weights that each ends with answer the demo's held-out problems, as do those that
both began with: the control. The two runs differ in more than delays: a run with sites trains on
what arrives first. The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.case_rows import say
from harness.processes import END_S, ended, started
from harness.run_dirs import summary_of

Tree = dict[str, Any]
SITES, DEMO = Path("examples/sites/two_sites.yaml"), Path("examples/arithmetic/demo.yaml")
MEMBERS = ("near", "far")
OUT = Path("runs/two_sites_benchmark")
BEGUN = Path("examples/arithmetic/student")
LIMIT_S = 1200.0
FIGURES = (
    *("updates", "wall_s", "samples_consumed", "samples_dropped"),
    *("staleness_mean_versions", "staleness_max_versions", "train_tokens_per_s"),
    *("learner_idle_ratio", "pause_s_mean"),
)


def measure(options: Sequence[str] = ()) -> Tree:
    """Make both runs and evaluate. RuntimeError: a process failed."""
    parser = argparse.ArgumentParser(prog="python -m studies two_sites")
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args(list(options)).out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    say("two sites")
    afar = at_sites(out)
    say("one place")
    one = ["--set", f"run.dir={out / 'one'}", "--set", "evaluation.problems=0"]
    with started(out / "one.log", "run", str(DEMO), *one) as run:
        ended("opd run", run, out / "one.log", LIMIT_S)
    return {
        "control_begun_with": evaluated(BEGUN),
        "one_place": figures(out / "one"),
        "two_sites": figures(out / "afar"),
        "exit_codes_of_sites": afar,
        "sites": summary_of(out / "afar")["sites"],
    }


def at_sites(out: Path) -> dict[str, int]:
    """Run the learner's site and both sampler sites; returns the exit codes of these."""
    own = ["--set", f"run.dir={out / 'afar'}", "--set", f"weight_sync.directory={out / 'weights'}"]
    with started(out / "afar.log", "run", str(SITES), *own) as run:
        logs = [out / f"{name}.log" for name in MEMBERS]
        with (
            started(logs[0], "site", MEMBERS[0], str(SITES), *own) as near,
            started(logs[1], "site", MEMBERS[1], str(SITES), *own) as far,
        ):
            ended("opd run", run, out / "afar.log", LIMIT_S)
            return {
                name: process.wait(END_S)
                for name, process in zip(MEMBERS, (near, far), strict=True)
            }


def figures(run_dir: Path) -> Tree:
    """Return what a run took, and what its last weights answer."""
    summary = summary_of(run_dir)
    found = {key: summary[key] for key in FIGURES if key in summary}
    return {
        **found,
        "status": summary["status"],
        "accuracy": evaluated(run_dir / "checkpoints" / "final"),
    }


def evaluated(model: Path) -> Tree:
    """Return what `opd eval` says of a checkpoint on the demo's held-out problems."""
    command = [sys.executable, "-m", "megatron_opd", "eval", str(DEMO)]
    done = subprocess.run(
        [*command, "--model", str(model), "--json"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout)
