"""Holds the servers of a fleet: who samples, who waits for weights, who gets the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal, TypeVar

from sglang_bridge.client import ServerClient
from sglang_bridge.cutoff import Cutoff
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.loads import Loads
from sglang_bridge.protocol import ServerInfo

# a server that failed gets no work for this long while another one can be asked
REST_S = 5.0
# so many requests in a row that stalled without any reply: the server hangs. One that stalls again
# and again on healthy servers is given up before (rollout.attempts).
HUNG_AFTER = 4

Reply = TypeVar("Reply")


State = Literal["serving", "waiting for weights", "draining"]


class Member:
    """Holds a server's client and its load. info: what it said of itself, once it was asked.

    drains: it gets no more work, and leaves when it has done what it has. tokens: that it has
    sampled or scored.
    """

    def __init__(self, client: ServerClient, info: ServerInfo | None = None) -> None:
        self.client, self.info = client, info
        self.serves = True
        self.drains = False
        self.loads: Loads | None = None
        """Those among which it gets work, to be told of every change of its load."""
        self._in_flight = 0
        self.tokens = 0
        self.rests_until_s = 0.0
        self.unreachable = False
        self._working: set[Cutoff] = set()
        self._gone, self._hung = asyncio.Event(), asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stalled = 0

    @property
    def in_flight(self) -> int:
        """Returns the number of requests that it works on."""
        return self._in_flight

    @in_flight.setter
    def in_flight(self, number: int) -> None:
        self._in_flight = number
        if self.loads is not None:
            self.loads.moved(self)

    @property
    def state(self) -> State:
        """Returns what it does, in words."""
        if self.drains:
            return "draining"
        return "serving" if self.serves else "waiting for weights"

    async def idle(self) -> None:
        """Returns once it works on nothing."""
        await self._idle.wait()

    def rest(self, *, unreachable: bool) -> None:
        """Gives it no work for a while. unreachable: not even if it is the only one."""
        self.rests_until_s = asyncio.get_running_loop().time() + REST_S
        self.unreachable = unreachable
        if self.loads is not None:
            self.loads.rests(self)

    def leave(self) -> None:
        """Ends what it works on: that raises ServerUnreachable, as a broken connection does."""
        self._gone.set()
        working, self._working = self._working, set()
        for end in working:
            end.cut()

    async def hung(self) -> None:
        """Returns once a request's end showed that the server hangs."""
        await self._hung.wait()

    async def reply(self, call: Callable[[ServerClient], Awaitable[Reply]]) -> Reply:
        """Returns the server's reply to work. ServerUnreachable: also if it is taken out."""
        self.in_flight += 1
        self._idle.clear()
        try:
            reply = await self.ask(call)
        except ServerUnreachable as error:
            self._failed(error)
            raise
        finally:
            self.in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()
        self._stalled, self.unreachable = 0, False
        return reply

    async def ask(self, call: Callable[[ServerClient], Awaitable[Reply]]) -> Reply:
        """Returns what `call` returns, which ends with the server's part in the fleet.

        Nothing is repeated after that: what comes back at its address is another process.
        ServerUnreachable: it was taken out.
        """
        end = Cutoff()
        if not self._gone.is_set():
            self._working.add(end)
            try:
                with end:
                    return await call(self.client)
            except TimeoutError:
                if not end.happened:
                    raise
            finally:
                self._working.discard(end)
        raise ServerUnreachable(self.client.url, "", "it was taken out", sent=True)

    def _failed(self, error: ServerUnreachable) -> None:
        error.gone = self._gone
        self._stalled += error.stalled
        silent = error.timed_out and not error.stalled
        if silent or self._stalled >= HUNG_AFTER:
            self._hung.set()


Shared = tuple[list[Member], Loads]
"""Servers among which requests are shared, and their loads."""


def _shared(members: list[Member]) -> Shared:
    loads = Loads(members)
    for member in members:
        member.loads = loads
    return members, loads


class Members:
    """Keeps those that take part in weight syncs, in order, and those that wait to be let in.

    evaluators: the first so many that serve take evaluations alone, as long as others serve; so
    many, whichever servers come and go. epoch: changes whenever one comes or goes. Use from one
    event loop.
    """

    def __init__(self, clients: list[ServerClient], evaluators: int = 0) -> None:
        self.present = [Member(client) for client in clients]
        self._waiting: list[Member] = []
        self._left: list[ServerClient] = []
        self._changed = asyncio.Event()
        self._evaluators = evaluators
        self._loads: tuple[Shared, Shared] | None = None
        self.epoch = 0

    @property
    def clients(self) -> tuple[ServerClient, ...]:
        """Returns the clients of all, also of those that wait or left."""
        return (*(member.client for member in self.all), *self._left)

    @property
    def all(self) -> tuple[Member, ...]:
        """Returns those that take part, then those that wait."""
        return (*self.present, *self._waiting)

    def at(self, url: str) -> Member:
        """Returns the server at `url`. ValueError: it is not there."""
        found = self.named(url)
        if not found:
            raise ValueError(f"{url} is no server of this fleet")
        return found[0]

    def named(self, url: str) -> list[Member]:
        """Returns the server at `url`, if it is there."""
        return [member for member in self.all if member.client.url == url]

    def drop(self, url: str) -> None:
        """Takes a server out. ValueError: it is not there."""
        found = self.at(url)
        self.present = [member for member in self.present if member is not found]
        self._waiting = [member for member in self._waiting if member is not found]
        found.leave()
        self._left.append(found.client)
        self._move()

    async def drain(self, url: str, limit_s: float) -> int:
        """Gives a server no more work; returns how much it still has, once none or `limit_s` later.

        It takes part in weight syncs as before. ValueError: it is not there.
        """
        member = self.at(url)
        member.drains = True
        self._notify()
        with suppress(TimeoutError):
            await asyncio.wait_for(member.idle(), limit_s)
        return member.in_flight

    def add(self, member: Member, *, waits: bool) -> None:
        """Takes a server in. waits: until `let_in`, and then until `serve` for its first work.

        ValueError: it is there already.
        """
        if self.named(member.client.url):
            raise ValueError(f"{member.client.url} is in this fleet already")
        member.serves = not waits
        (self._waiting if waits else self.present).append(member)
        self._move()

    async def let_in(self) -> None:
        """Lets those that wait take part; returns once at least one server takes part."""
        await self._until(lambda: bool(self.present or self._waiting))
        if self._waiting:
            self.present += self._waiting
            self._waiting = []
            self._move()

    def serve(self) -> None:
        """Gives work to all that take part."""
        if not all(member.serves for member in self.present):
            for member in self.present:
                member.serves = True
            self._notify()

    @property
    def none_serves(self) -> bool:
        """Returns whether no server gives answers, and one waits to be let in."""
        return bool(self._waiting) and not self._serving()

    async def until_none_serves(self) -> None:
        """Returns once that is so."""
        await self._until(lambda: self.none_serves)

    async def next(self, *, evaluates: bool = False, prefer: str = "") -> Member:
        """Returns who gets the next request, the least loaded; waits until there is one.

        evaluates: whether it is one of an evaluation. prefer: the server at this address, if it
        serves and does not rest: it has computed the beginning of the request before.
        One that failed is asked again only if no other can be, and one that could not be reached
        only after its rest: it may be about to be taken out.
        """
        while True:
            serving, loads = self._serving_by_load()[evaluates]
            if not serving:
                await self._changed.wait()
                continue
            now_s = asyncio.get_running_loop().time()
            for member in serving if prefer else ():
                if member.client.url == prefer and member.rests_until_s <= now_s:
                    return member
            found = serving[loads.least(now_s)]
            rest_s = found.rests_until_s - now_s if found.unreachable else 0.0
            if rest_s <= 0:
                return found
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), rest_s)

    def _serving(self) -> list[Member]:
        return [member for member in self.present if member.serves and not member.drains]

    def _serving_by_load(self) -> tuple[Shared, Shared]:
        """Returns who serves rollouts, and who serves evaluations; all serve both if need be."""
        if self._loads is None:
            for member in self.all:
                member.loads = None
            serving = self._serving()
            kept, others = serving[: self._evaluators], serving[self._evaluators :]
            if kept and others:
                self._loads = _shared(others), _shared(kept)
            else:
                everyone = _shared(serving)
                self._loads = everyone, everyone
        return self._loads

    def _move(self) -> None:
        self.epoch += 1
        self._notify()

    def _notify(self) -> None:
        self._loads = None
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()
