"""Runs `opd mismatch`: measures how far the learner's and the sampler's probabilities are apart."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_opd.cli.arguments import with_config
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.errors import RunFailed, UserError
from megatron_opd.mismatch.options import read_options
from megatron_opd.output import IMAGES

SUMMARY = "measure the gap between learner and sampler, on the same tokens and weights"
PROMPTS, THRESHOLD = 64, 0.1


def add_parser(verbs: Any) -> None:
    """Add `opd mismatch`."""
    verb = with_config(verbs, "mismatch", SUMMARY)
    verb.add_argument(
        "--prompts",
        type=int,
        default=PROMPTS,
        metavar="N",
        help=f"training prompts to answer, in the order of a run; default {PROMPTS}",
    )
    verb.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="longest response in tokens; default rollout.max_new_tokens",
    )
    verb.add_argument(
        "--buckets",
        metavar="N[,N]",
        help="longest response of each bucket of lengths; default an eighth, a quarter, a half "
        "and all of the longest response",
    )
    verb.add_argument(
        "--threshold",
        type=float,
        default=THRESHOLD,
        metavar="P",
        help=f"count tokens whose probabilities differ by more than P; default {THRESHOLD}",
    )
    verb.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    verb.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"draw them to FILE ({', '.join(IMAGES)})"
    )
    verb.set_defaults(handler=mismatch)


def mismatch(arguments: argparse.Namespace) -> int:
    """Measure, print the tables, write what was asked for."""
    overrides = list(arguments.overrides)
    if arguments.max_tokens is not None:
        if arguments.max_tokens < 1:
            raise UserError(f"--max-tokens must be >= 1, got {arguments.max_tokens}")
        overrides.append(f"rollout.max_new_tokens={arguments.max_tokens}")
    config = load_config(Config, arguments.config, overrides)
    options = read_options(arguments, config)
    from rich.console import Console

    from megatron_opd.mismatch.report import figures_of, tables
    from megatron_opd.mismatch.run import MismatchRun

    console = Console(highlight=False)
    run = MismatchRun(config, options, console)
    measured = run.measure()
    prepared = run.prepared
    spec = prepared.student.spec
    figures = figures_of(run.config, spec, prepared.prompts, measured, options, run.served)
    for table in tables(figures):
        console.print(table)
    if options.json is not None:
        from megatron_opd.metrics.sinks import write_json

        _write("--json", options.json, lambda path: write_json(path, figures))
        console.print(f"figures: {options.json}", soft_wrap=True)
    if options.plot is not None:
        from megatron_opd.mismatch.plot import draw

        _write("--plot", options.plot, lambda path: draw(figures, path))
        console.print(f"plot: {options.plot}", soft_wrap=True)
    return 0


def _write(option: str, path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise RunFailed(f"{option}: cannot write {path}: {error.strerror}") from None
