"""Parses the command line of `opd` and runs the subcommand.

Exit codes: 0 done, 1 a run failed, 2 bad input, 75 a run was preempted (start it again with
--auto-resume), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from megatron_opd import __version__
from megatron_opd.cli.commands import (
    check,
    compare,
    convert,
    fleet,
    make_data,
    mismatch,
    objective,
    plan,
    report,
    run,
    serve,
    sft,
    simulate,
    site,
    watch,
)
from megatron_opd.cli.commands import eval as evaluate
from megatron_opd.config.load import ConfigError
from megatron_opd.data.without_torch import leave_torch_out
from megatron_opd.errors import Preempted, RunFailed, UserError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
EXIT_PREEMPTED = os.EX_TEMPFAIL


COMMANDS = (
    *(run, serve, site, fleet),
    *(evaluate, check, simulate, plan, mismatch, objective),
    *(sft, convert, compare, report, watch, make_data),
)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of every subcommand, each with the function that runs it in `handler`."""
    parser = argparse.ArgumentParser(
        prog="opd", description="Asynchronous on-policy distillation on Megatron-Core and SGLang."
    )
    parser.add_argument("--version", action="version", version=f"megatron-opd {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    for command in COMMANDS:
        command.add_parser(verbs)
    return parser


def console(argv: Sequence[str] | None = None) -> int:
    """Run `opd` in a process of its own."""
    leave_torch_out()
    return main(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, dispatch, and turn every expected failure into one line on stderr."""
    # SIGTERM (a scheduler's stop) takes the same clean path as Ctrl-C; so does SIGINT sent to a
    # background job, which starts with it ignored. SIGUSR1 concerns runs alone, but a scheduler may
    # send it to every process of a job.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.handler(arguments)
    except (ConfigError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_INPUT
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    except Preempted as preempted:
        _heed_no_signal()
        print(f"preempted: {preempted}", file=sys.stderr)  # noqa: T201
        return EXIT_PREEMPTED
    except KeyboardInterrupt:
        _heed_no_signal()
        print("interrupted", file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader left (`opd check ... | head`): keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _heed_no_signal() -> None:
    """Let nothing interrupt a program that is exiting."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
