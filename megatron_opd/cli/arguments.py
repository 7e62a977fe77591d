"""Parses what several subcommands of `opd` have in common."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any


def with_config(verbs: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """Add a subcommand that reads CONFIG.yaml; `verbs` is argparse's action that holds them."""
    verb = verbs.add_parser(name, help=summary, description=summary)
    add_config(verb)
    return verb


def add_config(verb: argparse.ArgumentParser) -> None:
    """Add CONFIG.yaml and --set."""
    verb.add_argument("config", type=Path, metavar="CONFIG.yaml")
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one key, e.g. --set schedule.max_staleness=4 (repeatable)",
    )


def positive_number(text: str) -> float:
    """Parse a number > 0. argparse.ArgumentTypeError: it is none."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return value


def print_line(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(text + "\n")
