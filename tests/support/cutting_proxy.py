"""A TCP proxy whose first connections break on the way, whatever they carry."""

from __future__ import annotations

import asyncio
from typing import Self
from urllib.parse import urlsplit

CHUNK = 2**16


class CuttingProxy:
    """Passes bytes on to `address` (tcp://HOST:PORT), in both directions.

    cuts: so many connections break, after `after` bytes to whom connected. opened: connections so
    far.
    """

    def __init__(self, address: str, cuts: int = 0, after: int = 0) -> None:
        self._there = urlsplit(address)
        self.cuts, self.after = cuts, after
        self.opened = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Break every connection that is open."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        cuts = self.cuts > 0
        self.cuts -= cuts
        ends = {writer}
        try:
            there, back = await asyncio.open_connection(self._there.hostname, self._there.port)
            ends.add(back)
            self._writers |= ends
            ways = [self._pass(reader, back, None)]
            ways.append(self._pass(there, writer, self.after if cuts else None))
            tasks = [asyncio.create_task(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        except ConnectionError:  # nobody listens there: this connection ends too
            pass
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pass(
        self, source: asyncio.StreamReader, into: asyncio.StreamWriter, left: int | None
    ) -> None:
        """Pass bytes on, at most `left`, until the source ends."""
        while left != 0 and (data := await source.read(CHUNK if left is None else left)):
            into.write(data)
            await into.drain()
            left = left if left is None else left - len(data)
