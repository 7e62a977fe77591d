"""Runs one process on a node: `python -m megatron_opd.launch.step [--gpus 2,3] -- ARGUMENTS`.

Invariant: when this program ends no process is left of those that it started, directly or not.
Whoever started it, near or far, holds its standard input: a line there says in how many seconds all
must have ended; its end, when that program is gone in whatever way, says the same.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import MutableMapping, Sequence
from types import FrameType

from megatron_opd.launch.tree import Tree
from sglang_bridge.gpus import VARIABLE, let_see, visible_gpus

GRACE_S = 5.0
POLL_S = 0.1
EXIT_BAD_INPUT = 2
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MOST_GPUS = 1024  # of a node, where no variable names them


class _EndOrder(Exception):
    """Carries the seconds in which all must have ended; None: as many as by default."""

    def __init__(self, grace_s: float | None) -> None:
        super().__init__(grace_s)
        self.grace_s = grace_s


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of this program's arguments."""
    parser = argparse.ArgumentParser(prog="python -m megatron_opd.launch.step")
    parser.add_argument(
        "--gpus",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(),
        help=f"which of the node's GPUs, counted within {VARIABLE}; default: all of these",
    )
    parser.add_argument(
        "--grace-s",
        type=float,
        default=GRACE_S,
        help="how long all have to end by themselves where nothing else is said; default: 5",
    )
    parser.add_argument("arguments", nargs="+", help="what the node's Python runs")
    return parser


def narrow(environment: MutableMapping[str, str], gpus: Sequence[int]) -> None:
    """Let a process see these of the node's GPUs. ValueError: the node has fewer."""
    if not gpus:
        return
    names = visible_gpus(environment, MOST_GPUS)
    if max(gpus) >= len(names):
        raise ValueError(
            f"GPU {max(gpus)} of the node is reserved for this process, but {VARIABLE} lists "
            f"{len(names)} there, got {environment.get(VARIABLE)!r}; ask for whole nodes"
        )
    let_see(environment, [names[gpu] for gpu in gpus])


def run(
    arguments: Sequence[str], environment: MutableMapping[str, str], grace_s: float = GRACE_S
) -> int:
    """Run the node's Python until it ends or all must end; return its exit code."""
    for number in SIGNALS:
        signal.signal(number, _end_by_signal)
    tree = Tree([sys.executable, *arguments], environment)
    try:
        _wait(tree)
    except _EndOrder as order:
        grace_s = grace_s if order.grace_s is None else order.grace_s
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # it is ending
    tree.end(grace_s)
    assert tree.code is not None
    return tree.code if tree.code >= 0 else 128 - tree.code


def _end_by_signal(number: int, frame: FrameType | None) -> None:
    raise _EndOrder(None)


def _wait(tree: Tree) -> None:
    """Wait until the process ends. _EndOrder: all must end."""
    orders = sys.stdin.fileno()
    while tree.code is None:
        if select.select([orders], [], [], POLL_S)[0]:
            line = os.read(orders, 100)
            raise _EndOrder(float(line) if line else None)
        tree.reap()


def main(given: Sequence[str] | None = None) -> int:
    """Run the process. Exit code: its own, 128 + n for signal n; 2: its GPUs are not here."""
    parsed = build_parser().parse_args(given)
    environment = dict(os.environ)
    try:
        narrow(environment, parsed.gpus)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    return run(parsed.arguments, environment, parsed.grace_s)


if __name__ == "__main__":
    raise SystemExit(main())
