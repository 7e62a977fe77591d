"""A TCP proxy whose connections break: long after the request, just before the reply."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Self
from urllib.parse import urlsplit

import msgspec

from sglang_bridge import wire
from sglang_bridge.arrays import unpack

CHUNK = 2**16


class BreakingProxy:
    """Passes requests on to `url`, and breaks a connection with a rate for each sampled token.

    A reply of T tokens is lost with probability 1 - (1 - rate)^T: longer ones more often, as where
    connections break at a rate for each second, but on no machine more often than on another.
    broken: replies that were lost.
    """

    def __init__(self, url: str, rate: float, seed: int = 0) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self._host, self._port = address.hostname, address.port
        self._rate, self._random = rate, random.Random(seed)
        self.broken = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    back.write(await _message(reader))
                    reply = await _message(there)
                    if self._breaks(reply):
                        self.broken += 1
                        return
                    writer.write(reply)
                    await writer.drain()
        finally:
            back.close()
            writer.close()

    def _breaks(self, reply: bytes) -> bool:
        head, _, body = reply.partition(b"\r\n\r\n")
        tokens = 0
        if wire.WORK_TYPE.encode() in head.lower():
            tokens = len(unpack(msgspec.msgpack.decode(body)["output_ids"], "<i4"))
        return self._random.random() >= (1 - self._rate) ** tokens


async def _message(reader: asyncio.StreamReader) -> bytes:
    """One HTTP/1.1 message with a Content-Length or, without a body, none."""
    head = await reader.readuntil(b"\r\n\r\n")
    names = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    return head + await reader.readexactly(int(names.get(b"content-length", b"0")))
