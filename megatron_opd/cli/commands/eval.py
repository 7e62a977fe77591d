"""Runs `opd eval`: avg@k and pass@k of checkpoints on held-out problems."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_opd.cli.arguments import print_line, with_config
from megatron_opd.config.evaluation import ONLY_SET
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError


def add_parser(verbs: Any) -> None:
    """Add `opd eval`."""
    verb = with_config(
        verbs, "eval", "measure avg@k and pass@k of checkpoints on held-out problems"
    )
    which = verb.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face checkpoint")
    which.add_argument(
        "--checkpoints",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="run directories, checkpoints of runs (checkpoints/step-*) or Hugging Face "
        "checkpoints; what --out holds already is not evaluated again",
    )
    verb.add_argument("--json", action="store_true", help="with --model: print JSON")
    verb.add_argument(
        "--out", type=Path, metavar="FILE", help="with --checkpoints: keep the figures here (JSON)"
    )
    verb.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="with --checkpoints: draw the curve here; .png, .svg or .pdf",
    )
    verb.set_defaults(handler=evaluate)


def evaluate(arguments: argparse.Namespace) -> int:
    """Run `opd eval`: avg@k and pass@k of one checkpoint, or of many."""
    from megatron_opd.evaluation.evaluate import evaluate_checkpoint

    config = load_config(Config, arguments.config, arguments.overrides)
    if arguments.checkpoints is not None:
        return _evaluate_many(arguments, config)
    for option in ("out", "plot"):
        if getattr(arguments, option) is not None:
            raise UserError(f"--{option} has no effect with --model: use --checkpoints, or --json")
    reports = evaluate_checkpoint(config, arguments.model)
    if not arguments.json:
        of_several = len(reports) > 1
        for name, report in reports.items():
            print_line(f"{name}: {report.line()}" if of_several else report.line())
        return 0
    found = {name: report.as_dict() for name, report in reports.items()}
    print_line(json.dumps(found.get(ONLY_SET, found), indent=2))
    return 0


def _evaluate_many(arguments: argparse.Namespace, config: Config) -> int:
    from rich.console import Console

    from megatron_opd.evaluation.evaluate_many import evaluate_checkpoints

    if arguments.json:
        raise UserError("--json has no effect with --checkpoints, which write JSON to --out")
    if arguments.out is None:
        raise UserError("--checkpoints needs --out FILE.json, where its figures are kept")
    console = Console(highlight=False)
    evaluate_checkpoints(config, arguments.checkpoints, arguments.out, arguments.plot, console)
    return 0
