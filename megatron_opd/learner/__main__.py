"""Runs one rank of the learner, under torchrun.

torchrun --nproc-per-node=N -m megatron_opd.learner CONFIG.yaml --sft | --controller URL
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.config.sft import SftConfig
from sglang_bridge.imports import keep_out
from sglang_bridge.lifetime import die_with_parent

NEVER_IMPORTED = ("wandb", "tensorboard")
"""Packages that Megatron imports where they are installed, and no rank needs: the controller
writes what is measured. They are half of a rank's imports: 3 of 6.5 seconds of processor time."""
EXIT_BAD_INPUT = 2
LOOPBACK = "127.0.0.1"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of every rank's arguments."""
    parser = argparse.ArgumentParser(prog="python -m megatron_opd.learner")
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--sft", action="store_true", help="supervised fine-tuning (an SftConfig)")
    role.add_argument(
        "--controller", type=_address, metavar="tcp://HOST:PORT", help="serve this controller"
    )
    return parser


def _address(text: str) -> str:
    parts = urlsplit(text)
    try:
        whole = parts.scheme == "tcp" and parts.hostname and parts.port
    except ValueError:  # no port number
        whole = False
    if not whole or parts.path or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"must be tcp://HOST:PORT, got {text!r}")
    return text


def main() -> int:
    """Run the rank. Exit code: 0 done, 2 bad input (one line on stderr)."""
    arguments = build_parser().parse_args()
    die_with_parent()
    # seconds of imports, so after the above
    from megatron_opd.weight_sync.store import keep_groups_on

    try:
        if not arguments.sft:
            from megatron_opd.learner.serve import serve

            config = load_config(Config, arguments.config, arguments.overrides)
            keep_groups_on(config.weight_sync.host, config.cluster.interface)
            return serve(config, arguments.controller)
        from megatron_opd.learner.sft import run_sft

        keep_groups_on(LOOPBACK)
        run_sft(load_config(SftConfig, arguments.config, arguments.overrides))
        dist.destroy_process_group()
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    keep_out(*NEVER_IMPORTED)
    sys.exit(main())
