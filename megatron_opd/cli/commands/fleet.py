"""Runs `opd fleet`: lists the servers of a run under way, adds and removes them."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from megatron_opd.checkpoint.run_lock import RunDirHeld, refuse_if_held
from megatron_opd.cli.arguments import print_line
from megatron_opd.errors import UserError
from megatron_opd.fleet.mailbox import DIRECTORY, Answer, BadMailboxFile, Command, Sender, ServerRow
from megatron_opd.output import new_table

SUMMARY = "list, add or remove servers of a run under way"
ASK_EVERY_S, LOOK_EVERY_S = 0.1, 1.0
MAX_WIDTH = 1000
COLUMNS = ("role", "url", "state", "version", "in flight", "restarts", "tokens/s")


def add_parser(verbs: Any) -> None:
    """Add `opd fleet`."""
    fleet = verbs.add_parser("fleet", help=SUMMARY, description=SUMMARY)
    actions = fleet.add_subparsers(dest="action", required=True, metavar="list | add | remove")

    def with_run(name: str, summary: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run.dir of the run")
        action.set_defaults(handler=run_fleet, url="", role="", json=False)
        return action

    listing = with_run("list", "print the run's servers")
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    adding = with_run("add", "add a server that was started elsewhere, as by `opd serve`")
    adding.add_argument("url", metavar="URL", help="http(s)://HOST:PORT, as the run reaches it")
    adding.add_argument(
        "--role", default="student", help="student (default), teacher, teachers.NAME"
    )
    removing = with_run("remove", "let a server finish its requests and leave the run")
    removing.add_argument("url", metavar="URL", help="as `opd fleet list` prints it")


def run_fleet(arguments: argparse.Namespace) -> int:
    """Send one command to a run and print its answer. UserError: what the run says against it."""
    command = Command(arguments.action, arguments.url, arguments.role)
    answer = ask(arguments.run_dir, command)
    if answer.failed:
        raise UserError(answer.line)
    if arguments.json:
        print_line(json.dumps(msgspec.to_builtins(answer.servers), indent=2))
    elif arguments.action == "list":
        console, table = Console(), table_of(answer.servers)
        wide = console.options.update(max_width=MAX_WIDTH)
        # nothing is cut: urls are there to be copied
        console.width = max(console.width, Measurement.get(console, wide, table).maximum)
        console.print(table)
    else:
        print_line(answer.line)
    return 0


def ask(run_dir: Path, command: Command) -> Answer:
    """Return a run's answer, however long it takes. UserError: there is no run, or it ended."""
    _require_run(run_dir, "no run is under way there")
    try:
        sender = Sender(run_dir, command)
    except FileNotFoundError:
        raise UserError(
            f"{run_dir}: the run is starting, or ending; ask it while it trains"
        ) from None
    except OSError as error:
        raise UserError(
            f"{run_dir / DIRECTORY} cannot be written: {error.strerror}; commands come from the "
            "user whose run it is"
        ) from None
    try:
        looked_s = time.monotonic()
        while (answer := _answer(sender, run_dir)) is None:
            time.sleep(ASK_EVERY_S)
            if time.monotonic() - looked_s > LOOK_EVERY_S:
                looked_s = time.monotonic()
                _require_run(run_dir, "the run ended before it answered")
        return answer
    finally:
        sender.take_back()


def _answer(sender: Sender, run_dir: Path) -> Answer | None:
    try:
        return sender.answer()
    except (BadMailboxFile, OSError) as error:
        raise UserError(f"{run_dir}: the run's answer cannot be read: {error}") from None


def _require_run(run_dir: Path, otherwise: str) -> None:
    try:
        refuse_if_held(run_dir)
    except RunDirHeld:
        return
    except OSError as error:
        raise UserError(f"{run_dir} cannot be read: {error.strerror}") from None
    raise UserError(f"{run_dir}: {otherwise}")


def table_of(servers: tuple[ServerRow, ...]) -> Table:
    """Return what `opd fleet list` prints."""
    table = new_table(f"{len(servers)} servers", COLUMNS, text_columns=3)
    for row in servers:
        speed = "" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}"
        version = "" if row.version is None else str(row.version)
        numbers = (version, str(row.in_flight), str(row.restarts), speed)
        table.add_row(row.role, row.url, row.state, *numbers)
    return table
