"""Runs `opd plan`: the split of GPUs, layout and schedule with the highest throughput."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_opd.cli.arguments import with_config
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config


def add_parser(verbs: Any) -> None:
    """Add `opd plan`."""
    verb = with_config(verbs, "plan", "search for the split of GPUs with the highest throughput")
    verb.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs to split")
    verb.add_argument(
        "--gpu", metavar="NAME", help="kind of GPU; default: simulation.gpu, else h100"
    )
    verb.add_argument(
        "--staleness",
        type=int,
        metavar="S",
        help="largest bound on staleness, in updates; default: the config's schedule's",
    )
    verb.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="KEY[,KEY]",
        help="keys or sections that keep their values, e.g. schedule.type,learner.parallel",
    )
    verb.add_argument(
        "--trials",
        type=int,
        default=24,
        metavar="N",
        help="candidates of each staleness to simulate at most (default 24); 0: until the front "
        "is proven",
    )
    verb.add_argument("--out", type=Path, metavar="FILE", help="write the winner as a config here")
    verb.set_defaults(handler=plan)


def plan(arguments: argparse.Namespace) -> int:
    """Run `opd plan`: the split of GPUs, layout and schedule with the highest throughput."""
    from rich.console import Console

    from megatron_opd.cli.plan import run_plan

    return run_plan(
        load_config(Config, arguments.config, arguments.overrides),
        Console(highlight=False),
        gpus=arguments.gpus,
        gpu=arguments.gpu,
        staleness=arguments.staleness,
        keep=arguments.keep,
        out=arguments.out,
        trials=arguments.trials,
    )
