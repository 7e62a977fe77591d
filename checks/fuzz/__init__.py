"""Hostile inputs at every border: what is refused, what crashes, what is silently accepted.

    python -m checks fuzz

A target is one border: a file or message format that someone else wrote. Each has a module in
`targets/`, found by its name. An input counts as refused when the border raises one of its declared
exceptions with one printable line; as accepted when it returns; as a silent acceptance when it
returns although the target's oracle says that the input must be refused; as a crash in every other
case: another exception, a message of several lines, a hang, the death of the process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checks.fuzz.campaign import run_campaign
from checks.fuzz.targets import target_names


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """One row a target: inputs, refused, accepted, crashes, silent acceptances; and totals."""
    parser = argparse.ArgumentParser(prog="python -m checks fuzz")
    parser.add_argument("--target", action="append", help="only these (repeatable)")
    parser.add_argument("--inputs", type=int, default=2000, help="of a target (2000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--progress", type=Path, help="JSONL file of finished chunks; an existing one is resumed"
    )
    given = parser.parse_args(options)
    names = given.target or target_names()
    unknown = sorted(set(names) - set(target_names()))
    if unknown:
        parser.error(f"unknown target {unknown[0]!r}; choices: {', '.join(target_names())}")
    return run_campaign(names, given.inputs, given.seed, given.progress)
