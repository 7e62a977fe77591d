"""Runs `opd report RUN_DIR... [-o FILE]`, which writes one HTML file about one or several runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from megatron_opd.errors import UserError

DEFAULT = Path("report.html")
SUMMARY = "write one HTML file about runs: figures, curves, time line, failures, what to change"


def add_parser(verbs: Any) -> None:
    """Register the subcommand; `verbs` is argparse's action that holds subcommands."""
    verb = verbs.add_parser("report", help=SUMMARY, description=SUMMARY)
    verb.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="several are drawn into the same charts; they may still run, or have crashed",
    )
    verb.add_argument(
        "-o",
        "--out",
        type=Path,
        default=DEFAULT,
        metavar="FILE",
        help=f"HTML file to write or replace; default {DEFAULT}",
    )
    verb.set_defaults(handler=report)


def report(arguments: argparse.Namespace) -> int:
    """Write the report. Raises UserError."""
    from megatron_opd.report.page import page
    from megatron_opd.report.run_data import load_runs
    from megatron_opd.report.run_files import NotARun

    out: Path = arguments.out
    check_out(out)
    try:
        runs = load_runs(arguments.runs)
    except NotARun as error:
        raise UserError(f"opd report: {error}") from None
    content = page(runs).encode()
    write(out, content)
    sys.stdout.write(f"report: {out} ({len(content) / 1e6:.1f} MB)\n")
    return 0


def check_out(out: Path) -> None:
    """Reject a file that cannot be written, or that may be something else. Raises UserError."""
    if out.suffix not in (".html", ".htm"):
        raise UserError(f"-o must end in .html, so that it replaces nothing else, got {out}")
    if out.is_dir():
        raise UserError(f"-o must be a file, {out} is a directory")
    if not out.parent.is_dir():
        raise UserError(f"-o {out}: there is no directory {out.parent}")


def write(out: Path, content: bytes) -> None:
    """Replace `out` in one step. UserError: it cannot be written."""
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"-o {out} cannot be written: {error.strerror}") from None
