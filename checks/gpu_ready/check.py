"""Runs the parts, each in a process with the stand-in driver, and prints what they prove."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.gpu.check import Part, check, result_of
from checks.gpu.record import Record, Result
from checks.gpu_ready import driver
from harness.tree import ROOT
from megatron_opd.config.kernels import choose_kernels
from sglang_bridge.toolkit import toolkit

BUDGET_S = 600.0
NO_ENVIRONMENT = (
    "this environment has no TransformerEngine or no CUDA toolkit of the lock; run `make "
    "gpu-ready`, which makes .venv-gpu"
)
NO_COMPILER = (
    "no C++ compiler (g++) was found on PATH: the stand-in driver and SGLang's kernels are "
    "compiled by it, those of servers on a GPU too; install g++ (apt-get install g++)"
)


@dataclass(frozen=True)
class Claim(Part):
    """A part: the module of this package that measures it, and what its success proves.

    how: by what, in a few words.
    """

    proves: str
    how: str


CLAIMS = (
    Claim(
        "imports",
        10,
        150,
        "torch, TransformerEngine, SGLang, its kernels and every module of ours import",
        "stand-in driver, H100 pretended",
    ),
    Claim(
        "names",
        10,
        90,
        "every name that Megatron and we take from TransformerEngine is there, or not needed",
        "syntax trees of the installed sources",
    ),
    Claim(
        "layouts",
        20,
        180,
        "ranks of the examples build TransformerEngine's layers and hold what weight syncs plan",
        "meta device, fake process group",
    ),
    Claim(
        "updates",
        20,
        240,
        "updates on TransformerEngine's layers are those of Megatron's local layers; options too",
        "its modules computed by torch, one rank and two",
    ),
    Claim(
        "servers",
        20,
        150,
        "servers of the examples resolve as our hooks want them, and every hook is in place",
        "SGLang's own parser, H100 and B200 pretended",
    ),
    Claim(
        "kernels",
        20,
        240,
        "SGLang's run-time kernels compile with the environment that servers get",
        "the lock's nvcc, sm_90a",
    ),
)
"""The most telling first."""
NOT_PROVEN = (
    "that any kernel of CUDA computes rightly: TransformerEngine's, SGLang's, flashinfer's, ours",
    "speed, GPU memory, and what the allocator leaves of it",
    "NCCL: that groups form, between which ranks, and what a lost peer does",
    "CUDA IPC between a learner's and a server's process",
    "CUDA graphs, streams, and whatever depends on their order; what overlap brings",
    "8-bit training, DeepEP, HybridEP, activations on the host",
)
"""What only a card can tell."""


def check_environment(options: Sequence[str] = ()) -> dict[str, Any]:
    """Check the environment that this runs in. Exits with 2 where it is none for GPUs."""
    chosen = _arguments(options)
    home = require_environment("gpu_ready")
    with tempfile.TemporaryDirectory(prefix="opd-ready-") as scratch:
        place = Path(scratch)
        environment = surroundings(place, driver.build(place, home / "include" / "cuda.h"))

        def run_part(part: Part, limit_s: float) -> Result:
            command = [sys.executable, "-m", "checks.gpu_ready.child", part.name]
            out, log = place / f"{part.name}.json", place / f"{part.name}.log"
            return result_of([*command, str(out)], out, log, limit_s, environment)

        record = Record(place / "record.json", {})
        check(record, [claim for claim in CLAIMS if claim.name in chosen], BUDGET_S, run_part)
    print(table(record.results), file=sys.stderr)
    return record.figures() | {"not_proven": NOT_PROVEN}


def require_environment(check_name: str) -> Path:
    """The CUDA toolkit of this environment. Exits with 2, in one line, where a part is missing."""
    home = toolkit({})
    problem = None
    if home is None or not choose_kernels(cuda=True).engine:
        problem = NO_ENVIRONMENT
    elif shutil.which(driver.COMPILER) is None:
        problem = NO_COMPILER
    if home is None or problem is not None:
        print(f"{check_name}: {problem}", file=sys.stderr)
        raise SystemExit(2)
    return home


def surroundings(place: Path, library: Path) -> dict[str, str]:
    """What a part's process sees: the stand-in driver first, no device, this code, own caches."""
    paths = filter(None, (str(library.parent), os.environ.get("LD_LIBRARY_PATH")))
    own = {
        "LD_LIBRARY_PATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        # what was compiled before proves nothing
        "XDG_CACHE_HOME": str(place / "cache"),
    }
    return {"OMP_NUM_THREADS": "1"} | os.environ | own


def table(results: Mapping[str, Result]) -> str:
    """What is proven, how, in how many seconds; then what is not."""
    rows = [("part", "seconds", "proven", "how")]
    for claim in CLAIMS:
        if claim.name in results:
            found = results[claim.name]
            proven = claim.proves if found.status == "ok" else f"NOT: {claim.proves}"
            rows.append((claim.name, f"{found.seconds:.0f}", proven, claim.how))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    unknown = [f"  {line}" for line in NOT_PROVEN]
    return "\n".join(["", *lines, "", "only a card can tell:", *unknown])


def _arguments(options: Sequence[str]) -> tuple[str, ...]:
    names = tuple(claim.name for claim in CLAIMS)
    parser = argparse.ArgumentParser(prog="python -m checks gpu_ready")
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=names,
        help="some of " + ",".join(names),
    )
    chosen = parser.parse_args(list(options)).parts
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"--parts: {unknown[0]} is none of {', '.join(names)}")
    return tuple(chosen)
