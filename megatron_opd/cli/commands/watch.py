"""Runs `opd watch RUN_DIR`: a page in the browser that shows a run while it is made.

It reads files and nothing else, as a process of its own with the lowest claim on a CPU, so a run
cannot tell whether it is watched.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from megatron_opd.errors import UserError

HOST, PORT = "127.0.0.1", 8650
LAST_PORT = 65535
NICE = 19
"""Added to the process's niceness: training goes first."""


def add_parser(verbs: Any) -> None:
    """Register the subcommand; `verbs` is argparse's action that holds subcommands."""
    summary = "show a run in the browser, live: curves, engines, rollouts token by token"
    verb = verbs.add_parser("watch", help=summary, description=summary)
    verb.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    verb.add_argument(
        "--host",
        default=HOST,
        help=f"address to listen on; default {HOST}: this machine alone. The token is asked for "
        "anywhere, and nothing is encrypted: prefer ssh -L",
    )
    verb.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0: any that is free")
    verb.set_defaults(handler=watch)


def watch(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C. Raises UserError."""
    if not 0 <= arguments.port <= LAST_PORT:
        raise UserError(f"--port must be >= 0 and <= {LAST_PORT}, got {arguments.port}")
    # here, not above: other commands need no web server
    from megatron_opd.report.run_files import NotARun, RunFiles
    from megatron_opd.watch.serving import CannotListen, listen, serve

    try:
        files = RunFiles(arguments.run_dir)
        listener = listen(arguments.host, arguments.port)
    except (NotARun, CannotListen) as error:
        raise UserError(str(error)) from None
    os.nice(NICE)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(files, listener, arguments.host, _print))
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
