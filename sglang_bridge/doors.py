"""Watches the connections of an aiohttp server, which itself lets any number wait for ever.

Each connection's protocol passes everything on to aiohttp's, and keeps the connection's clock
(sglang_bridge/arrivals.py); a middleware tells it which requests are there and who may ask.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from sglang_bridge.arrivals import Arrival, ArrivalPhase, Arrivals
from sglang_bridge.refusals import Refusals

STRANGE = (401, 403)
"""What is answered to who has shown no key."""


class Door(asyncio.Protocol):
    """Passes a connection on to aiohttp's protocol `inner`."""

    def __init__(self, inner: asyncio.Protocol, arrivals: Arrivals) -> None:
        self._inner, self._arrivals = inner, arrivals
        self.arrival: Arrival | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock."""
        self.arrival = Arrival(self._arrivals, cast(asyncio.Transport, transport).abort)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        if self.arrival is not None:
            self.arrival.stop()
            self.arrival = None
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what came."""
        if self.arrival is not None:
            self.arrival.receive(len(data))
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pass it on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._inner.resume_writing()


def doors(server: web.Server, arrivals: Arrivals) -> Callable[[], Door]:
    """Return what makes the protocol of a connection, for `loop.create_server`."""
    return lambda: Door(server(), arrivals)


@web.middleware
async def tell_door(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Stop the clock while a request is answered; only who may ask may be silent after."""
    transport = request.transport
    door = None if transport is None else transport.get_protocol()
    arrival = door.arrival if isinstance(door, Door) else None
    if arrival is None:
        return await handler(request)
    arrival.enter(ArrivalPhase.ANSWER)
    known = False
    try:
        response = await handler(request)
        known = response.status not in STRANGE
    finally:
        arrival.answered(known=known)
    return response


class NotHttp(logging.Filter):
    """Counts what aiohttp would log with a traceback: bytes of a stranger that are no request."""

    def __init__(self, refusals: Refusals) -> None:
        super().__init__()
        self._refusals = refusals

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._refusals.add("what is not HTTP")
        return False


def counting_logger(refusals: Refusals, logger: logging.Logger) -> logging.Logger:
    """Return the logger for aiohttp's server, below `logger`."""
    made = logging.Logger(f"{logger.name}.http")
    made.parent = logger
    made.addFilter(NotHttp(refusals))
    return made
