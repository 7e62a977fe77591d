"""Reads the options of `opd mismatch`, and refuses bad ones before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.metrics.mismatch import default_edges
from megatron_opd.output import check_plot, check_writable


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
            check_writable(option, path)
    if arguments.plot is not None:
        check_plot(arguments.plot)
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
