"""Adds servers to a run under way and removes them; the learner and the other servers go on.

    add:    asked what it is --> waits for the next weight sync --> has weights, serves
                                                                  (a teacher serves at once)
    remove: gets no more work --> has done what it had, or cluster.drain_s is over
            --> leaves the fleet and the weight sync's group, between two weight syncs
            --> ended where `opd run` had started it; elsewhere a student is as it was when started

What a removed server did not finish is sent to the others. Like any other server, one that was
added is awaited when it is lost (supervisor.py); one that was removed is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

from megatron_opd.config.roles import STUDENT, Role, followers, gets_weights
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import is_server_url
from megatron_opd.errors import UserError
from megatron_opd.fleet.mailbox import ServerRow
from megatron_opd.fleet.supervisor import Supervisor
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError, one_line
from sglang_bridge.fleet import Fleet

REWIND_S = 600.0
"""Longest wait for a removed server to load its checkpoint again."""

Drop = Callable[[], None]


class Removable(Protocol):
    """Names the method of launch.processes.Processes that a removal needs."""

    async def remove(self, url: str) -> bool:
        """End the server at `url` for good; return whether it was started here."""
        ...


class Elastic:
    """Changes the fleets of one run.

    Args:
        config: the run's.
        fleets: of all roles.
        supervisor: watches what is added.
        processes: ends what was started here.
        take_in: puts a server that suits the run into a role's fleet; returns its client.
        remove_server: drops a server that gets weights, between two weight syncs; returns why it
            may hold a part of a weight sync's group still.
        say: tells the user.

    added, removed: urls, in order.
    """

    def __init__(
        self,
        config: Config,
        fleets: Mapping[Role, Fleet],
        supervisor: Supervisor,
        processes: Removable,
        take_in: Callable[[Role, str], Awaitable[ServerClient]],
        remove_server: Callable[[str, Drop], Awaitable[str | None]],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._fleets, self._supervisor = config, fleets, supervisor
        self._processes, self._take_in, self._remove_server = processes, take_in, remove_server
        self._say = say
        self._moving: dict[str, str] = {}
        self._counted: dict[tuple[Role, str], tuple[float, int]] = {}
        self.added: list[str] = []
        self.removed: list[str] = []

    @property
    def outliving(self) -> tuple[str, ...]:
        """Returns the servers that were sent weights and stay when the run ends.

        Something else started them.
        """
        config = self._config
        written = [config.served[role].urls for role in (STUDENT, *followers(config))]
        return (*chain.from_iterable(written), *self.added)

    def present(self, role: Role) -> frozenset[str]:
        """Return the urls of a role's servers, also of those that are lost and may come back."""
        known = {state.url for state in self._fleets[role].servers()} | self._supervisor.lost.keys()
        supervisor = self._supervisor
        return frozenset(
            url for url in known if role in supervisor.roles(url) and not supervisor.given_up(url)
        )

    # ------------------------------------------------------------ add

    async def add(self, role: Role, url: str) -> str:
        """Add a server; returns a line for the user. UserError: the run cannot use it."""
        self._require_elastic("add")
        url = url.strip().rstrip("/")
        if not is_server_url(url):
            raise UserError(f"a url must be http(s)://HOST:PORT, got {one_line(url, 80)!r}")
        if role not in self._fleets:
            roles = ", ".join(self._fleets)
            raise UserError(f"--role must be one of {roles}, got {one_line(role, 80)!r}")
        known = self._supervisor.roles(url)
        if known and not self._supervisor.given_up(url):
            raise UserError(f"{url} is a {known[0]} server of this run already")
        fleet = self._fleets[role]
        with self._alone(url, "added"):
            try:
                client = await self._take_in(role, url)
            except BridgeError as error:
                raise UserError(f"{url} cannot be added: {one_line(str(error))}") from None
            self._supervisor.keep(role, url, client)
        self._counted[role, url] = (_now_s(), 0)
        self.added.append(url)
        waits = fleet.syncs
        work = "samples" if role == STUDENT else "scores"
        when = f"{work} once the next weight sync gave it weights" if waits else "serves"
        return self._announced(f"{role} server {url} is added: it {when}")

    # ------------------------------------------------------------ remove

    async def remove(self, url: str) -> str:
        """Remove a server; returns a line for the user. UserError: the run needs it."""
        self._require_elastic("remove")
        url = url.strip().rstrip("/")
        roles = self._supervisor.roles(url)
        with self._alone(url, "removed"):
            if not roles:
                raise UserError(
                    f"{one_line(url, 80)} is no server of this run; `opd fleet list` shows them"
                )
            self._supervisor.release(url)
            cut_off = await self._drained(url, roles)
            clients = [self._fleets[r].client(url) for r in roles if self._is_in(r, url)]
            held = None
            if any(gets_weights(self._config, role) for role in roles):
                held = await self._remove_server(url, lambda: self._drop(roles, url))
            else:
                self._drop(roles, url)
            now = await self._supervisor.forget(url)
            ended = await self._processes.remove(now)
            self.removed.append(url)
            after = "it is ended" if ended else await self._left(roles, clients, held)
            await asyncio.gather(*(client.release() for client in clients))
        again = f"; {cut_off} requests were sent again" if cut_off else ""
        return self._announced(f"{roles[0]} server {url} is removed: {after}{again}")

    async def _drained(self, url: str, roles: tuple[Role, ...]) -> int:
        """Give it no more work; return how many requests it had not finished in time."""
        limit_s = self._config.cluster.drain_s
        fleets = [self._fleets[role] for role in roles if self._is_in(role, url)]
        work = sum(s.in_flight for fleet in fleets for s in fleet.servers() if s.url == url)
        self._say(f"{roles[0]} server {url} drains: {work} requests in flight")
        return sum(await asyncio.gather(*(fleet.drain(url, limit_s) for fleet in fleets)))

    def _drop(self, roles: tuple[Role, ...], url: str) -> None:
        for role in roles:
            if self._is_in(role, url):  # it may have been lost meanwhile
                self._fleets[role].drop(url)

    async def _left(
        self, roles: tuple[Role, ...], clients: list[ServerClient], held: str | None
    ) -> str:
        """Make a server elsewhere what it was when it started; return what the user is told."""
        written = any(gets_weights(self._config, role) for role in roles)
        if not written or not clients or clients[0].known_version == 0:
            return "another run may use it"
        if self._config.student.quantization is not None:
            return "restart it before another run uses it, as its weights are this run's"
        try:
            async with asyncio.timeout(REWIND_S):
                await clients[0].rewind()
        except (BridgeError, TimeoutError) as error:
            held = held or one_line(str(error)) or f"no answer within {REWIND_S:g} s"
        if held is not None:
            return f"restart it before another run uses it, as it was not released: {held}"
        return "it has its checkpoint's weights again, another run may use it"

    # ------------------------------------------------------------ list

    def rows(self) -> list[ServerRow]:
        """Describe every server now, and its speed since the last time."""
        rows: list[ServerRow] = []
        for role, fleet in self._fleets.items():
            for state in fleet.servers():
                rows.append(
                    ServerRow(
                        role,
                        state.url,
                        state.state,
                        state.version,
                        state.in_flight,
                        self._supervisor.restarted[state.url],
                        self._speed((role, state.url), state.tokens),
                    )
                )
        for url in self._supervisor.lost:
            restarts = self._supervisor.restarted[url]
            for role in self._supervisor.roles(url):
                rows.append(ServerRow(role, url, "lost", None, 0, restarts, None))
        return rows

    def _speed(self, server: tuple[Role, str], tokens: int) -> float | None:
        """Return tokens a second since the last time; None: there is no earlier time."""
        now_s, earlier = _now_s(), self._counted.get(server)
        self._counted[server] = (now_s, tokens)
        if earlier is None or now_s <= earlier[0]:
            return None
        # a server that came back counts from 0 again
        before = earlier[1] if earlier[1] <= tokens else 0
        return (tokens - before) / (now_s - earlier[0])

    # ------------------------------------------------------------ what they share

    def _require_elastic(self, verb: str) -> None:
        if self._config.run.deterministic:
            raise UserError(
                f"opd fleet {verb} needs run.deterministic: false, got true: with other servers "
                "the run could not be repeated bitwise"
            )

    def _is_in(self, role: Role, url: str) -> bool:
        return any(state.url == url for state in self._fleets[role].servers())

    @contextmanager
    def _alone(self, url: str, how: str) -> Iterator[None]:
        """Let one change of a server at a time pass. UserError: another one is under way."""
        if url in self._moving:
            raise UserError(f"{url} is being {self._moving[url]} already")
        self._moving[url] = how
        try:
            yield
        finally:
            del self._moving[url]

    def _announced(self, line: str) -> str:
        self._say(line)
        return line


def _now_s() -> float:
    return asyncio.get_running_loop().time()
