"""Starts and stops every process of a run that it started, on whatever machine, all together.

Invariant: `stop` leaves none of them, in whatever state the start was when it failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron_opd.errors import UserError
from megatron_opd.launch.handles import LearnerHandle, ServerHandle
from megatron_opd.launch.health import HealthGuard, WatchedProcess
from megatron_opd.launch.launcher import CannotPlace
from megatron_opd.launch.readiness import StartingPart, ready_now
from sglang_bridge.errors import PortInUse, ServerDied, exit_text
from sglang_bridge.lifetime import EXIT_LOST
from sglang_bridge.server.compiling import progress
from sglang_bridge.server.launch import last_lines

GRACE_S = 4.0
POLL_S = 0.2


class Processes:
    """Starts, watches and stops the servers and the learner world of one run."""

    def __init__(self, servers: Sequence[ServerHandle], learner: LearnerHandle | None) -> None:
        self.servers = tuple(servers)
        self.learner = learner
        self._stopping = False
        self._discards: dict[str, asyncio.Future[None]] = {}

    def start(self) -> None:
        """Start everything at once: start-up is mostly imports, and they overlap."""
        try:
            for server in self.servers:
                server.start()
        except PortInUse as error:
            raise UserError(str(error)) from None
        if self.learner is not None:
            self.learner.start()

    def parts(self, timeout_s: float) -> dict[str, StartingPart]:
        """Return what start-up waits for, by name: every server, and the learner's process.

        Each server has `timeout_s`. UserError, with the log's end, for what ends before it is up.
        """
        parts = {
            server.name: StartingPart(
                _ready(server, timeout_s),
                HealthGuard([_watched(server)]).watch,
                partial(progress, server.log_path),
            )
            for server in self.servers
        }
        if self.learner is not None:
            parts["the learner's process"] = StartingPart(ready_now(), self.learner_died)
        return parts

    async def learner_died(self) -> None:
        """Return never; raise UserError with the log's end once the learner has ended."""
        # a process has no event to wait on
        while self.learner is None or (code := self.learner.exit_code()) is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        assert self.learner.log is not None
        raise UserError(
            f"the learner ended with {exit_text(code)} during start-up; "
            f"the end of {self.learner.log}:\n{last_lines(self.learner.log)}"
        )

    def discard(self, url: str) -> None:
        """Kill the server at `url`, if it was started here; from now on its end means nothing."""
        for server in self._at(url):
            if url not in self._discards:
                ending = asyncio.to_thread(server.stop, 0)
                self._discards[url] = asyncio.ensure_future(ending)

    async def remove(self, url: str) -> bool:
        """End the server at `url` for good; returns whether it was started here."""
        found = self._at(url)
        self.discard(url)
        if found:
            await self._discards.pop(url)
            self.servers = tuple(server for server in self.servers if server not in found)
        return bool(found)

    async def put_another(self, url: str) -> str:
        """Put another server in place of the one at `url`, not started; return its url.

        It is another url where the node was lost.
        """
        (old,) = self._at(url)
        self.discard(url)
        await self._discards[url]
        try:
            new = await asyncio.to_thread(old.again)
        except CannotPlace as error:
            raise ServerDied(str(error)) from None
        self.servers = tuple(new if server is old else server for server in self.servers)
        del self._discards[url]
        return new.url

    async def start_one(self, url: str, timeout_s: float) -> None:
        """Start the server at `url` and wait until it answers, for at most `timeout_s`.

        ServerDied: it did not. PortInUse: something else has taken its port.
        """
        (server,) = self._at(url)
        server.start()
        await asyncio.to_thread(server.wait_ready, timeout_s)

    def watched(self) -> list[WatchedProcess]:
        """Return every process whose end nobody has asked for, as the health guard polls it."""
        if self._stopping:
            return []
        kept = [server for server in self.servers if server.url not in self._discards]
        return [*map(_watched, kept), *self.watched_learner()]

    @property
    def learner_ended(self) -> bool:
        """Returns whether the learner was started here and has ended."""
        return self.learner is not None and self.learner.exit_code() is not None

    async def restart_learner(self) -> dict[str, StartingPart]:
        """Start the learner again, if it was started here; return what its start-up waits for."""
        if self.learner is None:
            return {}
        await asyncio.to_thread(self.learner.stop, GRACE_S)
        try:
            self.learner = await asyncio.to_thread(self.learner.again)
        except CannotPlace as error:
            raise UserError(str(error)) from None
        self.learner.start()
        return {"the learner's process": StartingPart(ready_now(), self.learner_died)}

    def watched_learner(self) -> list[WatchedProcess]:
        """Return the learner as the health guard polls it; nothing if it runs elsewhere."""
        if (learner := self.learner) is None:
            return []
        found = WatchedProcess("the learner", learner.exit_code, learner.log, learner.cause)
        return [replace(found, follows=(EXIT_LOST,))]

    def watched_server(self, url: str) -> list[WatchedProcess]:
        """Return the server at `url` as the health guard polls it; none if it runs elsewhere."""
        return list(map(_watched, self._at(url)))

    def _at(self, url: str) -> list[ServerHandle]:
        return [server for server in self.servers if server.url == url]

    async def stop(self) -> None:
        """End everything at once, each part by its own process ids; one's failure hinders none."""
        self._stopping = True
        discards = await asyncio.gather(*self._discards.values(), return_exceptions=True)
        stops = [asyncio.to_thread(server.stop, GRACE_S) for server in self.servers]
        if self.learner is not None:
            stops.append(asyncio.to_thread(self.learner.stop, GRACE_S))
        for ended in (*discards, *await asyncio.gather(*stops, return_exceptions=True)):
            if isinstance(ended, BaseException):
                raise ended


def _watched(server: ServerHandle) -> WatchedProcess:
    return WatchedProcess(server.name, server.exit_code, server.log_path, server.cause, server.url)


async def _ready(server: ServerHandle, timeout_s: float) -> None:
    """Wait until it answers. UserError: it died, with its log's end; another has its port."""
    try:
        await asyncio.to_thread(server.wait_ready, timeout_s)
    except (ServerDied, PortInUse) as error:
        raise UserError(str(error)) from None
