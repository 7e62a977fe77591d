"""Serves `opd fleet` and cluster.fleet_file while a run is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from megatron_opd.errors import UserError
from megatron_opd.fleet.elastic import Elastic
from megatron_opd.fleet.mailbox import Answer, BadMailboxFile, Command, Mailbox
from megatron_opd.fleet.url_file import FleetFile
from sglang_bridge.errors import one_line

LOOK_EVERY_S = 0.5


class FleetCommands:
    """Executes the commands that arrive in a run's mailbox, several at a time.

    Args:
        run_dir: where the mailbox is.
        elastic: changes the fleets.
        file: urls of students to follow, if any.
        say: tells the user.
    """

    def __init__(
        self, run_dir: Path, elastic: Elastic, file: Path | None, say: Callable[[str], None]
    ) -> None:
        self._mailbox, self._elastic, self._say = Mailbox(run_dir), elastic, say
        self._file = None if file is None else FleetFile(file, elastic, say)

    async def serve(self) -> None:
        """Serve until this is cancelled. A mailbox that cannot be used is said, and no failure."""
        self._elastic.rows()  # tokens are counted from here on
        try:
            self._open()
            async with asyncio.TaskGroup() as tasks:
                if self._file is not None:
                    tasks.create_task(self._file.follow())
                await self._look(tasks)
        finally:
            self._mailbox.close()

    def _open(self) -> None:
        try:
            self._mailbox.open()
        except OSError as error:
            self._say(f"warning: opd fleet cannot be used: {error}")

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        said = ""
        while True:
            try:
                for name, command in self._mailbox.commands():
                    tasks.create_task(self._answer(name, command))
            except OSError as error:
                now = f"opd fleet: no commands can be read: {error}"
                if now != said:
                    self._say(f"warning: {now}")
                said = now
            await asyncio.sleep(LOOK_EVERY_S)

    async def _answer(self, name: str, command: Command | BadMailboxFile) -> None:
        try:
            answer = await self._execute(command)
        except (UserError, BadMailboxFile) as error:
            answer = Answer(line=one_line(str(error), 1000), failed=True)
        try:
            self._mailbox.answer(name, answer)
        except OSError as error:
            self._say(f"warning: opd fleet: an answer cannot be written: {error}")

    async def _execute(self, command: Command | BadMailboxFile) -> Answer:
        if isinstance(command, BadMailboxFile):
            raise command
        if command.action == "list":
            return Answer(servers=tuple(self._elastic.rows()))
        if command.action == "add":
            return Answer(line=await self._elastic.add(command.role, command.url))
        if self._file is not None and command.url.strip().rstrip("/") in self._file.listed:
            raise UserError(
                f"{command.url} is listed in cluster.fleet_file: take it out of there, else it "
                "would join again"
            )
        return Answer(line=await self._elastic.remove(command.url))
