"""Watches a file of student urls: what is added joins the run, what goes away is removed.

Servers that the file never named are not touched. A file that cannot be read changes nothing, and
what it says counts once two readings in a row agree, as an editor may write it in pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from megatron_opd.config.roles import STUDENT
from megatron_opd.config.servers import is_server_url
from megatron_opd.errors import UserError
from megatron_opd.fleet.elastic import Elastic
from sglang_bridge.errors import one_line

READ_EVERY_S = 2.0
MAX_BYTES = 1 << 20

Change = Callable[[str], Awaitable[str]]


class FleetFile:
    """Watches one file. say: tells the user, of each problem once."""

    def __init__(self, path: Path, elastic: Elastic, say: Callable[[str], None]) -> None:
        self._path, self._elastic, self._say = path, elastic, say
        self.listed: tuple[str, ...] = ()
        """What the file says."""
        self._named: set[str] = set()
        self._problems: dict[str, str] = {}
        self._busy: set[str] = set()

    async def follow(self) -> None:
        """Watch the file until this is cancelled."""
        before: tuple[str, ...] | None = None
        async with asyncio.TaskGroup() as changes:
            while True:
                now = self._read()
                if now is not None and now == before:
                    for url, change in self._wanted(now):
                        self._busy.add(url)
                        changes.create_task(self._change(url, change))
                if now is not None:
                    before = self.listed = now
                await asyncio.sleep(READ_EVERY_S)

    def _read(self) -> tuple[str, ...] | None:
        """Return the urls; None: it cannot be read, or is not a list of urls."""
        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            self._problem("", f"cluster.fleet_file {self._path} changes nothing: {why}")
            return None
        lines = (line.partition("#")[0].strip().rstrip("/") for line in text.splitlines())
        urls = tuple(dict.fromkeys(line for line in lines if line))
        for url in urls:
            if not is_server_url(url):
                shown = one_line(url, 80)
                said = f"a line must be http(s)://HOST:PORT, got {shown!r}"
                self._problem("", f"cluster.fleet_file {self._path} changes nothing: {said}")
                return None
        self._problems.pop("", None)
        return urls

    def _wanted(self, urls: tuple[str, ...]) -> list[tuple[str, Change]]:
        """Return what must change for the fleet to be as the file says."""
        there = self._elastic.present(STUDENT)
        gone = self._named - set(urls)
        self._named = {*urls, *(gone & (there | self._busy))}
        changes: list[tuple[str, Change]] = [(url, self._add) for url in urls if url not in there]
        changes += [(url, self._elastic.remove) for url in sorted(gone & there)]
        return [(url, change) for url, change in changes if url not in self._busy]

    async def _add(self, url: str) -> str:
        return await self._elastic.add(STUDENT, url)

    async def _change(self, url: str, change: Change) -> None:
        try:
            await change(url)
            self._problems.pop(url, None)
        except UserError as error:
            self._problem(url, f"cluster.fleet_file: {error}")
        finally:
            self._busy.discard(url)

    def _problem(self, url: str, line: str) -> None:
        """Tell the user of a problem that is new. url: which server's; empty: the file's."""
        if self._problems.get(url) != line:
            self._problems[url] = line
            self._say(f"warning: {line}")
