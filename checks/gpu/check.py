"""Runs the parts of a check within a budget, and keeps a record of them as they end."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.gpu.process import run
from checks.gpu.record import Record, Result
from harness.header import header
from megatron_opd.launch.gpus import has_gpu

NO_GPU = "gpu: no NVIDIA GPU is here; --dry runs every part at a tiny size on the CPU"


@dataclass(frozen=True)
class Part:
    """One part: the module of this package that measures it.

    least_s: it is not begun with less time left. most_s: it is ended after so many seconds.
    """

    name: str
    least_s: float
    most_s: float

    def limit_s(self, left_s: float) -> float | None:
        """How long it may run when `left_s` of the budget is left; None: not at all."""
        return None if left_s < self.least_s else min(self.most_s, left_s)


PARTS = (
    Part("installed", least_s=5, most_s=30),
    Part("tests", least_s=20, most_s=165),
    Part("lean", least_s=20, most_s=45),
    Part("sampling", least_s=15, most_s=30),
    Part("same_device", least_s=15, most_s=30),
    Part("step", least_s=45, most_s=150),
    Part("run", least_s=60, most_s=240),
)
"""The most telling first."""
RunPart = Callable[[Part, float], Result]


def check_machine(options: Sequence[str] = ()) -> dict[str, Any]:
    """Check this machine. options: the command line's. Exits with 2 where there is no GPU."""
    arguments = _arguments(options)
    if not arguments.dry and not has_gpu():
        print(NO_GPU, file=sys.stderr)
        raise SystemExit(2)
    head = header("checks", "gpu", options) | {"dry": arguments.dry, "budget_s": arguments.budget_s}
    record = Record(arguments.out, head)
    with tempfile.TemporaryDirectory() as scratch:

        def run_part(part: Part, limit_s: float) -> Result:
            return _in_child(part, limit_s, Path(scratch), dry=arguments.dry)

        chosen = [part for part in PARTS if part.name in arguments.parts]
        check(record, chosen, arguments.budget_s, run_part)
    return record.figures() | {"dry": arguments.dry, "budget_s": arguments.budget_s}


def check(
    record: Record,
    parts: Sequence[Part],
    budget_s: float,
    run_part: RunPart,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run every part that there is time for, in order; a later part may be short enough still."""
    started_s = clock()
    for part in parts:
        left_s = max(0.0, budget_s - (clock() - started_s))
        limit_s = part.limit_s(left_s)
        if limit_s is None:
            reason = f"{left_s:.0f} s of the budget are left, it takes at least {part.least_s:.0f}"
            result = Result("not run", reason=reason)
        else:
            result = run_part(part, limit_s)
        record.add(part.name, result)
        print(f"{part.name}: {result.line()}", file=sys.stderr, flush=True)


def _arguments(options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m checks gpu")
    parser.add_argument("--budget-s", type=float, default=540.0, help="of all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="the record")
    names = tuple(part.name for part in PARTS)
    parser.add_argument("--parts", type=_parts, default=names, help="some of " + ",".join(names))
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU")
    return parser.parse_args(list(options))


def _parts(text: str) -> tuple[str, ...]:
    chosen, known = tuple(text.split(",")), [part.name for part in PARTS]
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
    return chosen


def _in_child(part: Part, limit_s: float, scratch: Path, *, dry: bool) -> Result:
    """Run a part and read what it left."""
    out, log = scratch / f"{part.name}.json", scratch / f"{part.name}.log"
    command = [sys.executable, "-m", "checks.gpu.child", part.name, str(out), str(limit_s)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if dry:
        command.append("--dry")
        environment = {"OMP_NUM_THREADS": "1"} | environment | {"CUDA_VISIBLE_DEVICES": ""}
    return result_of(command, out, log, limit_s, environment)


def result_of(
    command: Sequence[str], out: Path, log: Path, limit_s: float, environment: Mapping[str, str]
) -> Result:
    """Run a part's process and read what it left in `out`."""
    ended = run(command, log, limit_s, environment)
    if out.exists():
        return Result(**json.loads(out.read_text(encoding="utf-8")), seconds=ended.seconds)
    reason = f"exit code {ended.exit_code}"
    if ended.exit_code is None:
        reason = f"ended after its limit of {limit_s:.0f} s"
    return Result("failed", ended.seconds, reason, last_lines=ended.last_lines)
