"""Keeps the servers of a run: one that is lost is taken out, started again, and taken in again.

    serves --> lost: its work goes to the others --> started again, after a wait
      ^                                                    |
      +-- has weights <-- waits for the next weight sync <-+     (a teacher serves at once)

A server that was started elsewhere is not started here: it is taken in when it answers again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.processes import LocalProcesses
from megatron_opd.cli.roles import Role, section_of
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.controller.health import EngineLost, HealthGuard, ProcessDied, WatchedEngine
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError, ServerDied, one_line
from sglang_bridge.fleet import Fleet

FIRST_WAIT_S, MAX_WAIT_S = 1.0, 60.0
BUDGET_S = 3600.0
"""max_restarts holds for so long: a server that lasts is not given up for what was long ago."""
ASK_EVERY_S = 2.0

TakeIn = Callable[[Role, str], Awaitable[None]]
"""Adds the server at a url to a role's fleet, if it is what the role needs."""


@dataclass
class _Server:
    """Holds what is known of one server.

    lost: set while it is taken out. restarts: when each was begun.
    """

    url: str
    roles: tuple[Role, ...]
    client: ServerClient
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    restarts: list[float] = field(default_factory=list)
    given_up: bool = False


class Supervisor:
    """Watches the servers of a run, by process where they were started here and by asking them.

    Args:
        config: how often a server may be started again, and how few a role needs.
        fleets: where servers are taken out and in.
        processes: starts and ends those of this machine.
        take_in: puts a server back into a fleet.
        say: tells the user.

    lost: {url: why} of the servers that are out. restarted: {url: how often it came back}.
    """

    def __init__(
        self,
        config: Config,
        fleets: Mapping[Role, Fleet],
        processes: LocalProcesses,
        take_in: TakeIn,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._fleets, self._processes = config, fleets, processes
        self._take_in, self._say = take_in, say
        self._servers: dict[str, _Server] = {}
        for fleet in fleets.values():
            for client in fleet.clients:
                roles = tuple(r for r, other in fleets.items() if client.url in other.urls)
                self._servers[client.url] = _Server(client.url, roles, client)
        self._lives: list[asyncio.Task[None]] = []
        self.restarted: Counter[str] = Counter()

    @property
    def lost(self) -> dict[str, str]:
        """Returns why each server that is out was lost."""
        return {url: server.why for url, server in self._servers.items() if server.lost.is_set()}

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch inside the block."""
        self._lives = [asyncio.create_task(self._life(server)) for server in self._servers.values()]
        try:
            yield
        finally:
            for life in self._lives:
                life.cancel()
            await asyncio.gather(*self._lives, return_exceptions=True)

    async def failed(self) -> Exception:
        """Return what the run cannot go on without, once it is gone."""
        lives = list(self._lives)
        while lives:
            done, waiting = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            for life in done:
                if (error := life.exception()) is not None:
                    assert isinstance(error, Exception)
                    return error
            lives = list(waiting)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    def lose(self, url: str, why: str) -> bool:
        """Take the server at `url` out; returns False, and does nothing, if the run needs it."""
        server = self._servers[url]
        if server.lost.is_set():
            return True
        if self._config.run.deterministic or not self._enough(server):
            return False
        server.why = one_line(why)
        server.lost.set()
        for role in server.roles:
            self._fleets[role].drop(url)
            left = len(self._fleets[role].urls)
            self._say(f"{role} server {url} is lost, the run goes on with {left}: {server.why}")
        # it may be stopped or hold a mixture of weights: nobody may ask it again
        self._processes.discard(url)
        return True

    def _section(self, role: Role) -> ServerConfig:
        return section_of(self._config, role)

    def _may_come_back(self, server: _Server) -> bool:
        limit = max(self._section(role).max_restarts for role in server.roles)
        return not server.given_up and _recent(server) < limit

    def _enough(self, server: _Server) -> bool:
        """Return whether every role of `server` has servers enough when it is out."""
        for role in server.roles:
            others = [o for o in self._servers.values() if role in o.roles and o is not server]
            left = [o for o in others if not o.lost.is_set() or self._may_come_back(o)]
            if len(left) + self._may_come_back(server) < self._section(role).min_servers:
                return False
        return True

    async def _life(self, server: _Server) -> None:
        """Keep a server until it is lost for good. EngineLost, ProcessDied: the run needs it."""
        while True:
            try:
                await self._watch(server)
            except (EngineLost, ProcessDied) as error:
                if not self.lose(server.url, str(error)):
                    raise
            clock = asyncio.get_running_loop().time
            began_s = clock()
            if not await self._brought_back(server):
                break
            server.lost.clear()
            self.restarted[server.url] += 1
            after_s = clock() - began_s
            for role in server.roles:
                self._say(f"{role} server {server.url} is back after {after_s:.0f} s")
        server.given_up = True
        if not self._enough(server):
            raise EngineLost(f"{server.roles[0]} server {server.url} is lost: {server.why}")

    async def _watch(self, server: _Server) -> None:
        """Return once someone else has lost it. EngineLost, ProcessDied: it is gone."""
        name = f"{server.roles[0]} server {server.url}"
        guard = HealthGuard(
            self._processes.watched_server(server.url), [WatchedEngine(name, server.client.alive)]
        )
        watch = asyncio.ensure_future(guard.watch())
        lost = asyncio.ensure_future(server.lost.wait())
        try:
            await asyncio.wait((watch, lost), return_when=asyncio.FIRST_COMPLETED)
            if not lost.done():
                watch.result()
        finally:
            for task in (watch, lost):
                task.cancel()
            await asyncio.gather(watch, lost, return_exceptions=True)

    async def _brought_back(self, server: _Server) -> bool:
        """Start it again, or wait until it answers again, and take it in; False: in vain."""
        while self._may_come_back(server):
            wait_s = min(FIRST_WAIT_S * 2 ** _recent(server), MAX_WAIT_S)
            server.restarts.append(asyncio.get_running_loop().time())
            await asyncio.sleep(wait_s)
            try:
                await self._started(server)
                for role in server.roles:
                    await self._take_in(role, server.url)
            except (BridgeError, UserError) as error:
                said = one_line(str(error))
                self._say(f"{server.roles[0]} server {server.url} does not come back: {said}")
                continue
            return True
        return False

    async def _started(self, server: _Server) -> None:
        """Start a server of this machine; wait for one elsewhere. ServerDied: it did not answer."""
        limit_s = self._section(server.roles[0]).startup_timeout_s
        if self._processes.watched_server(server.url):
            await self._processes.restart(server.url, limit_s)
            return
        try:
            async with asyncio.timeout(limit_s):
                while not await _answers(server.client):  # noqa: ASYNC110
                    await asyncio.sleep(ASK_EVERY_S)
        except TimeoutError:
            raise ServerDied(f"{server.url} did not answer within {limit_s:g} s") from None


def _recent(server: _Server) -> int:
    now_s = asyncio.get_running_loop().time()
    return sum(now_s - began_s < BUDGET_S for began_s in server.restarts)


async def _answers(client: ServerClient) -> bool:
    try:
        return await client.alive()
    except (OSError, BridgeError):
        return False
