"""Runs one case and says what it took: time, memory, processor seconds, tokens, losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.beside_trl.cases import CORES, Case, opd_config, trl_arguments
from benchmarks.beside_trl.processes import Watch, cpu_between
from sglang_bridge.server.launch import last_lines

Tree = dict[str, Any]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
TRL_ENVIRONMENT = {
    # glibc then gives freed tensors of 1 MiB and more back to the system; what this project starts
    # sets it itself (sglang_bridge/freed.py)
    "MALLOC_MMAP_THRESHOLD_": str(2**20),
}
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Step:
    """One update. at_s: when it ended, by the monotonic clock. loss: reverse KL, nats a token."""

    at_s: float
    response_tokens: int
    loss: float


def run_case(case: Case, models: Mapping[str, Path], own: Path, trl: str) -> Tree:
    """Run a case in the new directory `own`; returns its row. trl: interpreter of TRL.

    Raises RuntimeError, with the end of its log: it failed.
    """
    if case.system == "opd":
        file = own / "config.yaml"
        file.write_text(yaml.safe_dump(opd_config(case, models, own)), encoding="utf-8")
        command = [sys.executable, "-m", "megatron_opd", "run", str(file)]
        threads, rest = 1, "controller"
        parts = {
            "student server": f"--model-path {models['student']}",
            "teacher server": f"--model-path {models['teacher']}",
            "learner": "megatron_opd.learner",
        }
    else:
        file = own / "case.json"
        file.write_text(json.dumps(trl_arguments(case, models, own)), encoding="utf-8")
        # -P: none of the modules beside the program takes the place of a package's
        command = [trl, "-P", str(Path(__file__).with_name("trl_program.py")), str(file)]
        threads, rest, parts = CORES, "trainer", {}
    log, started = own / "log", time.monotonic()
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    for name in TRL_ENVIRONMENT:
        environment.pop(name, None)
    if case.system == "trl":
        environment.pop("PYTHONPATH", None)
        environment |= TRL_ENVIRONMENT
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        with Watch(process.pid, parts, rest) as watch:
            try:
                code = process.wait(LIMIT_S)
            finally:
                process.terminate()
    if code:
        raise RuntimeError(f"{case.name} failed (exit code {code}):\n{last_lines(log)}")
    steps = opd_steps(own / "run") if case.system == "opd" else trl_steps(own / "steps.jsonl")
    return {"wall_s": round(time.monotonic() - started, 1), **figures(case, steps, watch)}


def opd_steps(directory: Path) -> list[Step]:
    """Read metrics.jsonl of a run that has just ended on this machine."""
    monotonic_s = time.monotonic() - time.time()
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    return [
        Step(row["unix_time_s"] + monotonic_s, row["num_response_tokens"], row["reverse_kl_nats"])
        for row in map(json.loads, text.splitlines())
    ]


def trl_steps(file: Path) -> list[Step]:
    """Read what trl_program.py wrote; its tokens are sums since the beginning."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    before = [0, *(row["response_tokens"] for row in rows)]
    return [
        Step(row["at_s"], row["response_tokens"] - sum_before, row["loss"])
        for row, sum_before in zip(rows, before, strict=False)
    ]


def figures(case: Case, steps: Sequence[Step], watch: Watch) -> Tree:
    """Return the figures of the timed updates; memory is that of the whole run."""
    first, last = case.warm_up, case.updates - case.cool_down
    begin, timed = steps[first - 1], steps[first:last]
    seconds = timed[-1].at_s - begin.at_s
    cpu = cpu_between(watch.samples, begin.at_s, timed[-1].at_s)
    return {
        "timed_updates": len(timed),
        "step_s": seconds / len(timed),
        "step_s_of_each": [b.at_s - a.at_s for a, b in pairwise([begin, *timed])],
        "response_tokens_of_each": [step.response_tokens for step in steps],
        "response_tokens_per_s": sum(step.response_tokens for step in timed) / seconds,
        "cpu_s_per_step": {name: spent / len(timed) for name, spent in cpu.items()},
        "peak_pss_bytes": sum(watch.peak_pss_bytes().values()),
        "peak_pss_bytes_of_each": watch.peak_pss_bytes(),
        "reverse_kl_nats": [step.loss for step in steps],
        "reverse_kl_nats_first_two": fmean(step.loss for step in steps[:2]),
        "reverse_kl_nats_last_two": fmean(step.loss for step in steps[-2:]),
    }
