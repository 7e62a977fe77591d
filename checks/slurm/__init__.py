"""The Slurm launcher on a real Slurm of this machine.

    python -m checks slurm

What each process saw of its node; how long something is left of one that is lost in each way; that
a job which is told to end is requeued; and the arithmetic example by the examples' job script:
whole, with a server killed, and told to end, requeued and continued.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checks.slurm import run
from checks.slurm.here import OneMachine, missing, write_program
from harness.tree import ROOT

PROBE_S = 300.0


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Every part, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m checks slurm")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=8, help="of a node; they are none")
    parser.add_argument("--folder", type=Path, help="of Slurm and its logs; default: a new one")
    parsed = parser.parse_args(options)
    if absent := missing():
        raise SystemExit(f"not installed: {', '.join(absent)}; apt-get install slurm-wlm munge")
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = parsed.folder or stack.enter_context(tempfile.TemporaryDirectory())
        slurm = stack.enter_context(OneMachine(Path(folder), parsed.nodes, parsed.gpus))
        version = slurm.ask("scontrol", "--version").strip()
        found["slurm"] = f"{version}, {parsed.nodes} nodes of {parsed.gpus} made-up GPUs"
        for part in parsed.parts:
            start_s = time.monotonic()
            found[part] = PARTS[part](slurm)
            found[part]["wall_s"] = round(time.monotonic() - start_s, 1)
    found["failed"] = any(found[part]["failed"] for part in parsed.parts)
    return found


def launcher(slurm: OneMachine) -> dict[str, Any]:
    """The probe in a job on half of each node, while another job has the first half of node 1."""
    out = slurm.folder / "launcher.json"
    job = slurm.folder / "probe.sh"
    job.write_text(f"#!/bin/bash\nexec python -m checks.slurm.probe {out}\n")
    half = slurm.gpus // 2
    with slurm.occupied(slurm.names[0], half):
        wanted = [f"--nodes={len(slurm.names)}", f"--gpus-per-node={half}", "--no-kill"]
        cores = ["--ntasks-per-node=1", "--cpus-per-task=4"]
        where = [f"--output={slurm.folder}/probe.log", f"--chdir={ROOT}"]
        state = slurm.ended(slurm.submit(*wanted, *cores, *where, job), PROBE_S)
    if not out.exists():
        log = (slurm.folder / "probe.log").read_text()
        return {"failed": True, "state": state, "log": log.splitlines()[-20:]}
    facts = json.loads(out.read_text())
    left = sum(found["processes_left"] for found in facts.values() if "processes_left" in found)
    return {"failed": state != "COMPLETED" or left > 0, "state": state, **facts}


# Ends with exit code 75 when it is told to, and with 0 when the job runs again.
PREEMPTED = """\
import os, signal, sys, time
restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
print(f"restart {restarts}", flush=True)
if restarts != "0":
    sys.exit(0)
def told(number, frame):
    after_s = time.monotonic() - start_s
    print(f"told {signal.Signals(number).name} after {after_s:.0f} s", flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR1, told)
start_s = time.monotonic()
time.sleep(300)
print("not told")
"""


def requeue(slurm: OneMachine) -> dict[str, Any]:
    """A job of two minutes, told 50 s before its end, by the examples' job script.

    Slurm may tell it up to a minute earlier.
    """
    folder, log = slurm.folder / "requeue", slurm.folder / "requeue" / "job.log"
    write_program(folder / "opd", f"#!{sys.executable}\n{PREEMPTED}")
    wanted = ["--nodes=1", "--cpus-per-task=8", "--time=2", "--signal=B:USR1@50"]
    where = [f"--chdir={ROOT}", f"--output={log}", run.JOB]
    path = f"{folder}:{slurm.environment['PATH']}"
    state = slurm.ended(slurm.submit(*wanted, *where, PATH=path), PROBE_S)
    lines = log.read_text().splitlines()
    told = [line for line in lines if line.startswith("told SIGUSR1")]
    done = state == "COMPLETED" and lines[0] == "restart 0" and lines[-1] == "restart 1"
    return {"failed": not (done and told), "state": state, "log": lines}


PARTS = {
    "launcher": launcher,
    "requeue": requeue,
    "demo": run.demo,
    "recovery": run.recovery,
    "preempted": run.preempted,
}
