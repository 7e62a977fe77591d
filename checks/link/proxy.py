"""Forwards TCP connections to a link's server, and does to them what a bad network does."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

BLOCK = 16 << 10


def never() -> None:
    """A connection that is not cut."""
    return


@dataclass
class Proxy:
    """Listens on `address` once started.

    target: port of the server on this machine. cut_after: draws after how many bytes of both
    directions a connection is cut, None for never. flip: share of blocks of which one bit is
    flipped. frozen: bytes vanish, and nobody is told.
    """

    target: int
    cut_after: Callable[[], int | None] = never
    flip: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    frozen: bool = False
    connections: int = 0
    cuts: int = 0
    flips: int = 0
    forwarded: int = 0
    recorded: list[bytes] | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> str:
        """Begin to listen; return the address for clients."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Cut every connection now."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        """Stop, and cut what is open."""
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # the server is being restarted
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._writers.update(pair)
        left = [self.cut_after()]
        # one side is gone, so the other goes too
        with contextlib.suppress(OSError, EOFError):
            await asyncio.gather(
                self._forward(reader, far_writer, left, record=True),
                self._forward(far_reader, writer, left, record=False),
            )
        for end in pair:
            end.transport.abort()
        self._writers.difference_update(pair)

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        left: list[int | None],
        *,
        record: bool,
    ) -> None:
        while True:
            data = await reader.read(BLOCK)
            if not data:
                raise EOFError
            if self.frozen:
                continue
            budget = left[0]
            if budget is not None and len(data) >= budget:
                writer.write(data[:budget])
                await writer.drain()
                self.cuts += 1
                raise EOFError
            if budget is not None:
                left[0] = budget - len(data)
            if record and self.recorded is not None:
                self.recorded.append(data)
            if self.chance.random() < self.flip:
                data = flipped(data, self.chance)
                self.flips += 1
            self.forwarded += len(data)
            writer.write(data)
            await writer.drain()


def flipped(data: bytes, chance: random.Random) -> bytes:
    """The bytes with one bit changed."""
    changed = bytearray(data)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)
