"""A client that sends a byte now and then, and waits until the server closes."""

import asyncio
import contextlib

HEAD_S, LIMIT_S = 0.4, 60.0
"""How long a server waits for a request's head in these tests; and how long something that must
happen may take, on a machine that is busy with other things."""


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Waits until the server closes; what it said before."""
    async with asyncio.timeout(LIMIT_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def dripped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    """Sends a byte now and then; what the server said before it closed."""

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            for byte in data:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(HEAD_S / 10)

    sending = asyncio.create_task(drip())
    try:
        return await closed(reader)
    finally:
        sending.cancel()
