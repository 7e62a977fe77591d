"""The unit suite and the gloo suite on the versions of the GPU environment, without a GPU.

    python -m checks gpu_suites [--suites unit,dist] > benchmarks/results/gpu_suites.json

Run in .venv-gpu (`make gpu-ready-suites`), with the stand-in driver of gpu_ready. The learner's
package is imported before any test, since a test may import Megatron first: without a GPU it leaves
TransformerEngine out, whose kernels Megatron would otherwise call on a CPU. Servers are no part of
it: tests/e2e needs what SGLang computes on a GPU, or takes the CPU's own environment.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checks.gpu.process import run
from checks.gpu.tests import counts, outcomes
from checks.gpu_ready import driver
from checks.gpu_ready.check import require_environment, surroundings

SUITES = {"unit": "tests/unit", "dist": "tests/dist"}
DESELECTED = {
    "tests/unit/studies/test_findings.py::test_the_record_is_what_its_rows_say": (
        "the record's sums are Python 3.11's; from 3.12 on sum() rounds floats less, so that last "
        "digits differ"
    ),
}
"""Tests that are left out, each with the reason."""
LIMIT_S = 7200.0
"""Longest time of a suite: ten times what it takes on two idle cores."""
# as `make test`: a file stays on one worker
OPTIONS = ("-q", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")
FIRST = ("-p", "megatron_opd.learner", "-p", "no:cacheprovider")
PASSED, SOME_FAILED = 0, 1
"""Exit codes of pytest that leave a whole report."""


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Run the suites. options: the command line's. Exits with 2 where it is no GPU environment."""
    chosen = _arguments(options)
    home = require_environment("gpu_suites")
    with tempfile.TemporaryDirectory(prefix="opd-suites-") as scratch:
        place = Path(scratch)
        library = driver.build(place, home / "include" / "cuda.h")
        environment = surroundings(place, library)
        # Ray starts no node with GPUs of its own where the list of them is empty
        del environment["CUDA_VISIBLE_DEVICES"]
        suites = {name: run_suite(name, place, environment) for name in chosen}
    return {
        "suites": suites,
        "deselected": DESELECTED,
        "failed": [name for name, found in suites.items() if found["failed"]],
    }


def run_suite(name: str, place: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Counts, seconds, reasons of what was skipped, and what failed, of one suite."""
    report, log = place / f"{name}.xml", place / f"{name}.log"
    without = [word for test in DESELECTED for word in ("--deselect", test)]
    command = [sys.executable, "-m", "pytest", SUITES[name], *OPTIONS, *FIRST, *without]
    ended = run([*command, f"--junitxml={report}"], log, LIMIT_S, environment)
    if ended.exit_code not in (PASSED, SOME_FAILED):
        print(*ended.last_lines, sep="\n", file=sys.stderr)
        return {"failed": [f"pytest ended with {ended.exit_code}"], "seconds": ended.seconds}
    found = summary(outcomes(report)) | {"seconds": round(ended.seconds, 1)}
    print(f"{name}: {found['counts']} in {ended.seconds:.0f} s", *found["failed"], sep="\n  ",
          file=sys.stderr, flush=True)  # fmt: skip
    return found


def summary(tests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many tests had which outcome, why some were skipped, and each that failed with why."""
    skipped = Counter(test["message"] for test in tests if test["outcome"] == "skipped")
    failed = [f"{test['name']}: {test['message']}" for test in tests if test["outcome"] == "failed"]
    return {"counts": counts(list(tests)), "skipped": dict(skipped), "failed": failed}


def _arguments(options: Sequence[str]) -> tuple[str, ...]:
    parser = argparse.ArgumentParser(prog="python -m checks gpu_suites")
    parser.add_argument(
        "--suites",
        type=lambda text: text.split(","),
        default=tuple(SUITES),
        help="some of " + ",".join(SUITES),
    )
    chosen = parser.parse_args(list(options)).suites
    unknown = [name for name in chosen if name not in SUITES]
    if unknown:
        parser.error(f"--suites: {unknown[0]} is none of {', '.join(SUITES)}")
    return tuple(chosen)
