"""Runs `opd mismatch`: measures how far the learner's and the sampler's probabilities are apart."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron_opd.cli.errors import RunFailed, UserError
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config

SUMMARY = "measure the gap between learner and sampler, on the same tokens and weights"
PROMPTS, THRESHOLD = 64, 0.1
IMAGES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Options:
    """Holds what the command line asks for besides the configuration.

    edges: the longest response of each bucket of lengths, rising.
    """

    prompts: int
    edges: tuple[int, ...]
    threshold: float
    json: Path | None
    plot: Path | None


def add_options(verb: argparse.ArgumentParser) -> None:
    """Add the options of `opd mismatch` to its parser."""
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

    from megatron_opd.cli.mismatch_report import figures_of, tables
    from megatron_opd.cli.mismatch_run import MismatchRun

    console = Console(highlight=False)
    run = MismatchRun(config, options, console)
    measured = run.measure()
    prepared = run.prepared
    spec = prepared.student.spec
    figures = figures_of(run.config, spec, prepared.prompts, measured, options)
    for table in tables(figures):
        console.print(table)
    if options.json is not None:
        from megatron_opd.metrics.sinks import write_json

        _write("--json", options.json, lambda path: write_json(path, figures))
        console.print(f"figures: {options.json}", soft_wrap=True)
    if options.plot is not None:
        from megatron_opd.cli.mismatch_plot import draw

        _write("--plot", options.plot, lambda path: draw(figures, path))
        console.print(f"plot: {options.plot}", soft_wrap=True)
    return 0


def read_options(arguments: argparse.Namespace, config: Config) -> Options:
    """Check the options before anything is started. Raises UserError."""
    if arguments.prompts < 1:
        raise UserError(f"--prompts must be >= 1, got {arguments.prompts}")
    if not 0 < arguments.threshold < 1:
        raise UserError(
            f"--threshold is a difference of probabilities, which must be > 0 and < 1, got "
            f"{arguments.threshold:g}"
        )
    if config.rollout.top_p < 1:
        raise UserError(
            "rollout.top_p must be 1 for opd mismatch: below it the sampler renormalises over a "
            f"part of the vocabulary, and the learner does not; got {config.rollout.top_p:g}, add "
            "--set rollout.top_p=1"
        )
    for option, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None:
            _check_writable(option, path)
    if arguments.plot is not None:
        _check_plot(arguments.plot)
    return Options(
        arguments.prompts,
        _edges(arguments.buckets, config.rollout.max_new_tokens),
        arguments.threshold,
        arguments.json,
        arguments.plot,
    )


def _edges(given: str | None, most_tokens: int) -> tuple[int, ...]:
    """Return the buckets' longest responses. Raises UserError."""
    if given is None:
        from megatron_opd.metrics.mismatch import default_edges

        return tuple(default_edges(most_tokens))
    try:
        edges = tuple(int(part) for part in given.split(","))
    except ValueError:
        edges = ()
    if not _rises(edges):
        raise UserError(f"--buckets must be rising numbers of tokens from 1 on, got {given!r}")
    return edges


def _rises(edges: Sequence[int]) -> bool:
    return bool(edges) and edges[0] >= 1 and list(edges) == sorted(set(edges))


def _check_writable(option: str, path: Path) -> None:
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{option} must be a file in a directory that can be written, got {path}")


def _check_plot(path: Path) -> None:
    if path.suffix not in IMAGES:
        raise UserError(f"--plot must end in {', '.join(IMAGES)}, got {path}")
    if find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'megatron-opd[plots]'")


def _write(option: str, path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise RunFailed(f"{option}: cannot write {path}: {error.strerror}") from None
