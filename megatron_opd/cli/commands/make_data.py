"""Runs `opd make-data`: writes the files of a built-in task."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_opd.cli.arguments import print_line
from megatron_opd.errors import UserError, checked


def add_parser(verbs: Any) -> None:
    """Add `opd make-data`."""
    verb = verbs.add_parser("make-data", help="write a built-in task's train and held-out files")
    verb.add_argument("task", help="name of the task, such as arithmetic")
    verb.add_argument("--out", type=Path, required=True, help="directory to write to")
    verb.add_argument("--train", type=int, default=4096, metavar="N", help="training problems")
    verb.add_argument("--heldout", type=int, default=256, metavar="N", help="held-out problems")
    verb.add_argument("--seed", type=int, default=0, help="seed of the problems")
    verb.set_defaults(handler=make_data)


def make_data(arguments: argparse.Namespace) -> int:
    """Run `opd make-data`: write the files of a built-in task."""
    from megatron_opd.data.writer import write_task

    for file in (arguments.out / "train.jsonl", arguments.out / "heldout.jsonl"):
        if file.exists():
            raise UserError(f"--out: {file} exists already; choose another directory or remove it")
    try:
        written = checked(
            lambda: write_task(
                arguments.task, arguments.out, arguments.train, arguments.heldout, arguments.seed
            )
        )
    except OSError as error:
        raise UserError(f"--out: cannot write to {arguments.out}: {error.strerror}") from None
    print_line(f"{written.train_file}: {written.train} problems")
    print_line(f"{written.heldout_file}: {written.heldout} problems")
    return 0
