"""Lets uvicorn, under SGLang's HTTP server, close connections on which a request comes too slowly.

uvicorn limits only how long a connection that has been answered may be silent. Its protocol's class
is extended here when it is chosen, whichever it is (h11's or httptools'), by what it knows of its
connection: the request that is under way, and how much of it has come.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import uvicorn

from sglang_bridge.arrivals import Arrival, ArrivalPhase, Arrivals
from sglang_bridge.refusals import Refusals
from sglang_bridge.server.auth import ADMITTED

MALFORMED = "Invalid HTTP request received."
NEEDED = ("data_received", "on_response_complete", "handle_websocket_upgrade")


def guard_connections(arrivals: Arrivals, *, asks_key: bool) -> None:
    """Watch the connections of every uvicorn server that this process starts from now on.

    asks_key: whether only requests that auth.py admits make a connection known; otherwise all do.
    """
    ours: Any = uvicorn.Config
    load, malformed = ours.load, Malformed(arrivals.refusals)

    def load_guarded(config: Any) -> None:
        load(config)
        logging.getLogger("uvicorn.error").addFilter(malformed)
        config.http_protocol_class = guarded(
            config.http_protocol_class, arrivals, asks_key=asks_key
        )

    ours.load = load_guarded


class Malformed(logging.Filter):
    """Counts what uvicorn would log each time: bytes of a stranger that are no request."""

    def __init__(self, refusals: Refusals) -> None:
        super().__init__()
        self._refusals = refusals

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        if record.msg != MALFORMED:
            return True
        self._refusals.add("what is not HTTP")
        return False


def guarded(
    base: type[asyncio.Protocol], arrivals: Arrivals, *, asks_key: bool
) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol `base`, with a clock for each connection.

    RuntimeError: it is none that this module knows.
    """
    missing = [name for name in NEEDED if not hasattr(base, name)]
    if missing:
        raise RuntimeError(
            f"uvicorn's {base.__name__} has no {', '.join(missing)}: another version"
        )
    parent: Any = base

    class Guarded(parent):
        _arrival: Arrival | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._arrival = Arrival(arrivals, transport.abort, lambda: self.flow.read_paused)

        def connection_lost(self, exc: Exception | None) -> None:
            self._leave()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            arrival = self._arrival
            if arrival is not None:
                arrival.receive(len(data))
            super().data_received(data)
            if arrival is not None and self._arrival is not None:
                self._enter(arrival)

        def on_response_complete(self) -> None:
            arrival = self._arrival
            if arrival is not None:
                arrival.answered(known=not asks_key or self.cycle.scope.get(ADMITTED, False))
            super().on_response_complete()
            if arrival is not None and not self.cycle.response_complete:
                self._enter(arrival)  # the next request had come before

        def handle_websocket_upgrade(self, *event: Any) -> None:
            self._leave()  # the connection has another protocol from now on
            super().handle_websocket_upgrade(*event)

        def _enter(self, arrival: Arrival) -> None:
            if self.cycle is None or self.cycle.response_complete:
                return  # it waits for a head, since it was made or began to come
            arrival.enter(ArrivalPhase.BODY if self.cycle.more_body else ArrivalPhase.ANSWER)

        def _leave(self) -> None:
            if self._arrival is not None:
                self._arrival.stop()
                self._arrival = None

    Guarded.__name__ = f"Guarded{base.__name__}"
    return Guarded
