"""Runs `opd compare RUN_DIR RUN_DIR`, which says whether two runs made the same updates."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.cli.arguments import print_line
from megatron_opd.errors import UserError
from megatron_opd.metrics.compare import ColumnDifference, RunComparison, compare_rows

EXIT_EQUAL, EXIT_DIFFERENT = 0, 1
SHOWN = 12  # differing columns


def add_parser(verbs: Any) -> None:
    """Register the subcommand; `verbs` is argparse's action that holds subcommands."""
    summary = "compare two runs' updates, column by column of their metrics.jsonl"
    verb = verbs.add_parser("compare", help=summary, description=summary)
    verb.add_argument("a", type=Path, metavar="RUN_DIR")
    verb.add_argument("b", type=Path, metavar="RUN_DIR")
    verb.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="R",
        help="relative difference that counts as equal; 0, the default, means the same bits",
    )
    verb.set_defaults(handler=compare)


def compare(arguments: argparse.Namespace) -> int:
    """Print the comparison; exit code 0: equal within the tolerance, 1: not."""
    tolerance: float = arguments.tolerance
    if not 0 <= tolerance < 1:
        raise UserError(f"--tolerance must be >= 0 and < 1, got {tolerance}")
    a, b = read_rows(arguments.a), read_rows(arguments.b)
    found = compare_rows(a, b)
    if len(a) != len(b):
        print_line(f"{arguments.a} has {len(a)} updates, {arguments.b} has {len(b)}")
    for line in report(found, tolerance):
        print_line(line)
    return EXIT_DIFFERENT if found.beyond(tolerance) else EXIT_EQUAL


def report(found: RunComparison, tolerance: float) -> list[str]:
    """Return the printed lines of a comparison."""
    beyond = found.beyond(tolerance)
    what = f"{found.updates} updates, {len(found.columns)} columns"
    aside = f"{len(found.left_out)} columns of time, memory and queues left out"
    if not beyond:
        largest = max((each.relative for each in found.differences), default=0.0)
        equal = f"equal to {largest:.1e}" if largest else "bitwise equal"
        return [f"{what}: {equal} ({aside})"]
    lines = [f"{what}: {len(beyond)} columns differ ({aside})"]
    lines += [
        f"  {ascii(each.column)[1:-1]}: from update {each.first_update} on, "
        f"in {each.updates} rows, {_how_far(each)}"
        for each in beyond[:SHOWN]
    ]
    if len(beyond) > SHOWN:
        lines.append(f"  and {len(beyond) - SHOWN} more")
    return lines


def _how_far(found: ColumnDifference) -> str:
    if math.isinf(found.relative):
        return "in some of them only one run holds a number"
    return f"relative difference up to {found.relative:.1e}"


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a run's metrics.jsonl. Raises UserError."""
    path = RunDir(run_dir).metrics
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # the last one is still being written
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, no text, or nested without end
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: not a JSON object")
        rows.append(row)
    if not rows:
        raise UserError(f"{path} holds no update yet")
    return rows
