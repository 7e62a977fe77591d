"""Runs `opd site NAME CONFIG.yaml`: a sampler site, far from the learner."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_opd.cli.arguments import add_config
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config


def add_parser(verbs: Any) -> None:
    """Add `opd site`."""
    summary = "run a sampler site, far from the learner: its servers and its link"
    verb = verbs.add_parser("site", help=summary, description=summary)
    verb.add_argument("name", metavar="NAME", help="one of sites.members")
    add_config(verb)
    verb.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="the site's secrets, as the run wrote them; default: sites/NAME.keys in run.dir",
    )
    verb.set_defaults(handler=site)


def site(arguments: argparse.Namespace) -> int:
    """Run `opd site`: a sampler site, until its learner's run has ended."""
    from megatron_opd.sites.run_site import run_site

    config = load_config(Config, arguments.config, arguments.overrides)
    return run_site(config, arguments.name, arguments.keys)
