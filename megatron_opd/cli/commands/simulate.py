"""Runs `opd simulate`: the controller on simulated servers and learner."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_opd.cli.arguments import with_config
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config


def add_parser(verbs: Any) -> None:
    """Add `opd simulate`."""
    verb = with_config(
        verbs, "simulate", "predict a run: the controller on simulated servers and learner"
    )
    given = verb.add_mutually_exclusive_group()
    given.add_argument(
        "--calibrate",
        type=Path,
        metavar="RUN_DIR",
        help="fit costs and lengths to this recorded run, and say how far off they are",
    )
    given.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="JSON file of what all work costs; default: simulation.costs, or what the GPU "
        "simulation.gpu is predicted to take",
    )
    verb.add_argument(
        "--overwrite", action="store_true", help="replace an earlier run in the same run.dir"
    )
    verb.set_defaults(handler=simulate)


def simulate(arguments: argparse.Namespace) -> int:
    """Run `opd simulate`: the controller on simulated servers and learner."""
    from rich.console import Console

    from megatron_opd.sim.simulate import run_simulation

    config = load_config(Config, arguments.config, arguments.overrides)
    console = Console(highlight=False)
    return run_simulation(
        config,
        console,
        costs_file=arguments.costs,
        recorded=arguments.calibrate,
        overwrite=arguments.overwrite,
    )
