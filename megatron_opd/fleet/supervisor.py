"""Keeps the servers of a run: one that is lost is taken out, started again, and taken in again.

    serves --> lost: its work goes to the others --> started again, after a wait
      ^                                                    |
      +-- has weights <-- waits for the next weight sync <-+     (a teacher serves at once)

A server that was started elsewhere is not started here: it is taken in when it answers again.
Servers may be added (`keep`), and let go (`release`, `forget`): such a one never comes back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_opd.config.roles import Role, section_of
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.errors import UserError
from megatron_opd.fleet.budget import Budget
from megatron_opd.launch.health import (
    EngineLost,
    HealthGuard,
    ProcessDied,
    WatchedEngine,
    WatchedProcess,
)
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError, ServerDied, one_line
from sglang_bridge.fleet import Fleet

FIRST_WAIT_S, MAX_WAIT_S = 1.0, 60.0
ASK_EVERY_S = 2.0

TakeIn = Callable[[Role, str], Awaitable[ServerClient]]
"""Adds the server at a url to a role's fleet, if it is what the role needs; returns its client."""


class Watch(Protocol):
    """Names the method of controller.health.HealthGuard that notices a server's end."""

    async def watch(self) -> None:
        """Run until cancelled. Raises ProcessDied or EngineLost."""
        ...


MakeWatch = Callable[[Sequence[WatchedProcess], Sequence[WatchedEngine]], Watch]


class ServerProcesses(Protocol):
    """Names the methods of launch.processes.Processes that are about a run's servers."""

    def watched_server(self, url: str) -> list[WatchedProcess]:
        """Return the server at `url` as the health guard polls it; none if it runs elsewhere."""
        ...

    def discard(self, url: str) -> None:
        """Kill the server at `url`, if it was started here; from now on its end means nothing."""
        ...

    async def put_another(self, url: str) -> str:
        """Put another server in place of the one at `url`, not started; return its url."""
        ...

    async def start_one(self, url: str, timeout_s: float) -> None:
        """Start the server at `url`; wait until it answers, for at most `timeout_s`. ServerDied."""
        ...


@dataclass(eq=False)
class _Server:
    """Holds what is known of one server.

    lost: set while it is taken out. released: the run does without it from now on.
    """

    url: str
    roles: tuple[Role, ...]
    client: ServerClient
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    restarts: Budget = field(default_factory=Budget)
    given_up: bool = False
    released: bool = False


class Supervisor:
    """Watches the servers of a run, by process where they were started here and by asking them.

    Args:
        config: how often a server may be started again, and how few a role needs.
        fleets: where servers are taken out and in.
        processes: starts and ends those of this machine.
        take_in: puts a server back into a fleet.
        say: tells the user.
        make_watch: makes what notices the end of a server, of its processes and by asking it.

    lost: {url: why} of the servers that are out. restarted: {url: how often it came back}.
    """

    def __init__(
        self,
        config: Config,
        fleets: Mapping[Role, Fleet],
        processes: ServerProcesses,
        take_in: TakeIn,
        say: Callable[[str], None],
        make_watch: MakeWatch = HealthGuard,
    ) -> None:
        self._config, self._fleets, self._processes = config, fleets, processes
        self._take_in, self._say, self._make_watch = take_in, say, make_watch
        self._servers: dict[str, _Server] = {}
        for fleet in fleets.values():
            for client in fleet.clients:
                roles = tuple(r for r, other in fleets.items() if client.url in other.urls)
                self._servers[client.url] = _Server(client.url, roles, client)
        self._releasing: dict[str, _Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lives: dict[_Server, asyncio.Task[None]] = {}
        """What watches each server and starts it again."""
        self._failures: list[Exception] = []
        self._failed = asyncio.Event()
        self.restarted: Counter[str] = Counter()

    @property
    def lost(self) -> dict[str, str]:
        """Returns why each server that is out was lost."""
        return {url: server.why for url, server in self._servers.items() if server.lost.is_set()}

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch inside the block."""
        for server in self._servers.values():
            self._lives[server] = self.start(self._life(server))
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do `work` beside watching; its failure ends the run. Call inside the block."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._failures.append(error)
            self._failed.set()

    async def failed(self) -> Exception:
        """Return what the run cannot go on without, once it is gone."""
        await self._failed.wait()
        return self._failures[0]

    # ------------------------------------------------------------ servers that come and go

    def roles(self, url: str) -> tuple[Role, ...]:
        """Return the roles of a server, also of one that is lost; none: the run has no such."""
        server = self._servers.get(url)
        return () if server is None else server.roles

    def given_up(self, url: str) -> bool:
        """Return whether a server is lost, and not started again or awaited any more."""
        server = self._servers.get(url)
        return server is not None and server.given_up

    def keep(self, role: Role, url: str, client: ServerClient) -> None:
        """Watch a server that was added to a role's fleet, and await it whenever it is lost."""
        server = self._servers[url] = _Server(url, (role,), client)
        self._lives[server] = self.start(self._life(server))

    def release(self, url: str) -> None:
        """Do without a server from now on. UserError: a role has too few then."""
        server = self._servers[url]
        server.released = True  # so that it does not count as one that may come back
        if not self._enough(server):
            server.released = False
            role = server.roles[0]
            raise UserError(
                f"{url} cannot be removed: {role} would have fewer servers than "
                f"{role}.min_servers = {self._section(role).min_servers}; add another one first"
            )
        self._releasing[url] = server

    async def forget(self, url: str) -> str:
        """End the watch over a server that was released; return where it is now.

        One that was lost may have been about to start elsewhere.
        """
        server = self._releasing.pop(url)
        life = self._lives.pop(server, None)
        if life is not None:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
        for place in (url, server.url):
            self._servers.pop(place, None)
        return server.url

    # ------------------------------------------------------------ servers that are lost

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
        gone = server.given_up or server.released
        return not gone and server.restarts.recent < limit

    def _enough(self, server: _Server) -> bool:
        """Return whether every role of `server` has servers enough when it is out."""
        for role in server.roles:
            others = [
                other
                for other in self._servers.values()
                if role in other.roles and other is not server and not other.released
            ]
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
        """Return once someone else has lost it. EngineLost, ProcessDied: it is gone, or hangs."""
        name = f"{server.roles[0]} server {server.url}"
        engines = [WatchedEngine(name, server.client.alive)]
        guard = self._make_watch(self._processes.watched_server(server.url), engines)
        watch = asyncio.ensure_future(guard.watch())
        lost = asyncio.ensure_future(server.lost.wait())
        hung = [asyncio.ensure_future(self._fleets[r].hung(server.url)) for r in server.roles]
        tasks: list[asyncio.Future[Any]] = [watch, lost, *hung]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return
            if watch.done():
                watch.result()
            raise EngineLost(f"{name} hangs: requests there make no progress")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _brought_back(self, server: _Server) -> bool:
        """Start it again, or wait until it answers again, and take it in; False: in vain."""
        while self._may_come_back(server):
            wait_s = min(FIRST_WAIT_S * 2**server.restarts.recent, MAX_WAIT_S)
            server.restarts.spend()
            await asyncio.sleep(wait_s)
            try:
                await self._started(server)
                for role in server.roles:
                    server.client = await self._take_in(role, server.url)
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
            del self._servers[server.url]
            server.url = await self._processes.put_another(server.url)
            self._servers[server.url] = server
            await self._processes.start_one(server.url, limit_s)
            return
        try:
            async with asyncio.timeout(limit_s):
                while not await _answers(server.client):  # noqa: ASYNC110
                    await asyncio.sleep(ASK_EVERY_S)
        except TimeoutError:
            raise ServerDied(f"{server.url} did not answer within {limit_s:g} s") from None


async def _answers(client: ServerClient) -> bool:
    try:
        return await client.alive() and await client.has_started()
    except (OSError, BridgeError):
        return False
