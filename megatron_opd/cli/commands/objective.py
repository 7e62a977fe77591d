"""Runs `opd objective CASE.json`: any configured loss on a hand-written cache."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_opd.cli.arguments import print_line


def add_parser(verbs: Any) -> None:
    """Add `opd objective`."""
    verb = verbs.add_parser(
        "objective",
        help="evaluate a loss on a hand-written cache",
        description="Evaluate any objective on a cache written by hand, as JSON: "
        "{objective, support?, correction?, reduction?, offsets?, weight?, student_logp, "
        "sampler_logp?, teacher_logp?, prox_logp?, path?, lengths?, rewards?, groups?} -> "
        "{loss, grad_student_logp, metrics}.",
    )
    verb.add_argument("case", type=Path, metavar="CASE.json")
    verb.set_defaults(handler=objective)


def objective(arguments: argparse.Namespace) -> int:
    """Run `opd objective CASE.json`: print the report as JSON."""
    from megatron_opd.cli.objective_case import objective_report

    print_line(json.dumps(objective_report(arguments.case), indent=2))
    return 0
