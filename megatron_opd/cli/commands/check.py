"""Runs `opd check`: validates a configuration and prints the plan, and starts nothing."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_opd.cli.arguments import positive_number, with_config
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config


def add_parser(verbs: Any) -> None:
    """Add `opd check`."""
    verb = with_config(
        verbs, "check", "validate a config and print the plan without starting anything"
    )
    verb.add_argument(
        "--data",
        action="store_true",
        help="read all rows and all weights, instead of the first rows and the headers",
    )
    verb.add_argument(
        "--link-gbs",
        type=positive_number,
        metavar="GB/S",
        help="what a rank sends in a second, for the predicted time of a weight sync; default 50",
    )
    verb.set_defaults(handler=check)


def check(arguments: argparse.Namespace) -> int:
    """Run `opd check`: validate the configuration and print the plan."""
    from rich.console import Console

    from megatron_opd.cli.tables.check import LINK_GBS
    from megatron_opd.cli.tables.check import check as check_config

    config = load_config(Config, arguments.config, arguments.overrides)
    link_gbs = arguments.link_gbs or LINK_GBS
    check_config(config, Console(), data=arguments.data, link_gbs=link_gbs)
    return 0
