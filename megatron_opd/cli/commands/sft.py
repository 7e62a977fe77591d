"""Runs `opd sft`: supervised fine-tuning on the Megatron learner."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_opd.cli.arguments import with_config
from megatron_opd.config.load import load_config
from megatron_opd.config.sft import SftConfig


def add_parser(verbs: Any) -> None:
    """Add `opd sft`."""
    verb = with_config(verbs, "sft", "run supervised fine-tuning on the Megatron learner")
    verb.set_defaults(handler=sft)


def sft(arguments: argparse.Namespace) -> int:
    """Run `opd sft`: supervised fine-tuning."""
    from megatron_opd.launch.sft import run_sft

    return run_sft(load_config(SftConfig, arguments.config, arguments.overrides))
