"""Holds the servers of a fleet: who samples, who waits for weights, who gets the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.protocol import ServerInfo

# a server that failed gets no work for this long while another one can be asked
REST_S = 5.0

Reply = TypeVar("Reply")


class Member:
    """Holds a server's client and its load. info: what it said of itself, once it was asked."""

    def __init__(self, client: ServerClient, info: ServerInfo | None = None) -> None:
        self.client, self.info = client, info
        self.serves = True
        self.in_flight = 0
        self.rests_until_s = 0.0
        self.unreachable = False
        self._gone = asyncio.Event()

    def rest(self, *, unreachable: bool) -> None:
        """Gives it no work for a while. unreachable: not even if it is the only one."""
        self.rests_until_s = asyncio.get_running_loop().time() + REST_S
        self.unreachable = unreachable

    def leave(self) -> None:
        """Ends what it works on: that raises ServerUnreachable, as a broken connection does."""
        self._gone.set()

    async def reply(self, call: Callable[[ServerClient], Awaitable[Reply]]) -> Reply:
        """Returns the server's reply. ServerUnreachable: it was taken out while it worked."""
        with self._counted():
            work = asyncio.ensure_future(call(self.client))
            gone = asyncio.ensure_future(self._gone.wait())
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    url, why = self.client.url, "it was taken out"
                    raise ServerUnreachable(url, "", why, sent=True, taken_out=True)
                return await work
            finally:
                for task in (work, gone):
                    task.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Members:
    """Keeps those that take part in weight syncs, in order, and those that wait to be let in.

    epoch: changes whenever one comes or goes. Use from one event loop.
    """

    def __init__(self, clients: list[ServerClient]) -> None:
        self.present = [Member(client) for client in clients]
        self._waiting: list[Member] = []
        self._left: list[ServerClient] = []
        self._changed = asyncio.Event()
        self.epoch = 0

    @property
    def clients(self) -> tuple[ServerClient, ...]:
        """Returns the clients of all, also of those that wait or left."""
        there = (*self.present, *self._waiting)
        return (*(member.client for member in there), *self._left)

    def drop(self, url: str) -> None:
        """Takes a server out. ValueError: it is not there."""
        found = [m for m in (*self.present, *self._waiting) if m.client.url == url]
        if not found:
            raise ValueError(f"{url} is no server of this fleet")
        self.present = [member for member in self.present if member not in found]
        self._waiting = [member for member in self._waiting if member not in found]
        for member in found:
            member.leave()
            self._left.append(member.client)
        self._move()

    def add(self, member: Member, *, waits: bool) -> None:
        """Takes a server in. waits: until `let_in`, and then until `serve` for its first work.

        ValueError: it is there already.
        """
        if any(m.client.url == member.client.url for m in (*self.present, *self._waiting)):
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
    def is_stranded(self) -> bool:
        """Returns whether no server gives answers, and one waits to be let in."""
        return bool(self._waiting) and not self._serving()

    async def stranded(self) -> None:
        """Returns once that is so."""
        await self._until(lambda: self.is_stranded)

    async def next(self) -> Member:
        """Returns who gets the next request, the least loaded; waits until there is one.

        One that failed is asked again only if no other can be, and one that could not be reached
        only after its rest: it may be about to be taken out.
        """
        while True:
            await self._until(lambda: bool(self._serving()))
            now_s = asyncio.get_running_loop().time()
            found = min(self._serving(), key=lambda m: (max(m.rests_until_s, now_s), m.in_flight))
            rest_s = found.rests_until_s - now_s if found.unreachable else 0.0
            if rest_s <= 0:
                return found
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), rest_s)

    def _serving(self) -> list[Member]:
        return [member for member in self.present if member.serves]

    def _move(self) -> None:
        self.epoch += 1
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()
