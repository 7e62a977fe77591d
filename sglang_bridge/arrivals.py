"""Closes connections on which a request arrives too slowly, and bounds how many strangers wait.

Somebody who sends a byte now and then would otherwise hold a connection for ever, before any key is
asked. A head has HEAD_S from its first byte (a new connection: from its beginning), a body may not
fall behind LEAST_BYTES_S for longer than that. No clock runs while a request is answered, however
long that takes, and between two requests of who has shown a key. Servers report what happens on a
connection; this module knows neither HTTP nor sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from sglang_bridge.refusals import Refusals

HEAD_S = 10.0
LEAST_BYTES_S = 16 << 10
GRACE_S = 0.5
"""An event loop that was held up reads what has come meanwhile before a connection is closed."""
MOST_STRANGERS = 2048
"""As many as the kernel may hand over at once: whoever has a key sends his head at once, so that
the one that waits longest is a stranger's."""


class ArrivalPhase(Enum):
    """Says what a connection waits for. IDLE: for another request of one who has shown a key."""

    HEAD = auto()
    BODY = auto()
    ANSWER = auto()
    IDLE = auto()


SLOW = {
    ArrivalPhase.HEAD: "a request that came too slowly",
    ArrivalPhase.BODY: "a body that came too slowly",
}
SILENT = "a connection without a request"
TOO_MANY = "one of too many connections without a key"


class Arrivals:
    """Keeps the connections of one server. refusals: counts those that are closed.

    head_s, least_bytes_s, most_strangers: see HEAD_S, LEAST_BYTES_S, MOST_STRANGERS.
    """

    def __init__(
        self,
        refusals: Refusals,
        head_s: float = HEAD_S,
        least_bytes_s: float = LEAST_BYTES_S,
        most_strangers: int = MOST_STRANGERS,
    ) -> None:
        self.refusals = refusals
        self.head_s, self.least_bytes_s = head_s, least_bytes_s
        self._most = most_strangers
        # in the order in which they came
        self._strangers: dict[Arrival, None] = {}

    @property
    def strangers(self) -> int:
        """Returns how many connections wait that have shown no key."""
        return len(self._strangers)

    def wait(self, arrival: Arrival) -> None:
        """Note a stranger that waits; if there are too many, the one that came first goes."""
        self._strangers[arrival] = None
        if len(self._strangers) > self._most:
            next(iter(self._strangers)).refuse(TOO_MANY)

    def leave(self, arrival: Arrival) -> None:
        """Note that a connection is answered, known or closed."""
        self._strangers.pop(arrival, None)


class Arrival:
    """Watches one connection, from its beginning; use inside the event loop.

    close: ends it at once. paused: whether the server itself does not read at present.
    """

    def __init__(
        self,
        server: Arrivals,
        close: Callable[[], None],
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._server, self._close, self._paused = server, close, paused
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._phase = ArrivalPhase.ANSWER
        self._known = False
        self._received = 0
        self._began_s = 0.0
        self._warned = False
        self.enter(ArrivalPhase.HEAD)

    def receive(self, size: int) -> None:
        """Note that bytes came."""
        self._received += size
        if self._phase is ArrivalPhase.IDLE:
            self.enter(ArrivalPhase.HEAD)

    def enter(self, phase: ArrivalPhase) -> None:
        """Note what the connection waits for from now on."""
        if phase is self._phase:
            return
        self._phase = phase
        self.stop()
        if phase in (ArrivalPhase.HEAD, ArrivalPhase.BODY):
            self._begin()
            if not self._known:
                self._server.wait(self)

    def answered(self, *, known: bool) -> None:
        """Note that a request is answered. known: who sent it has shown a key."""
        self._known = known
        self._phase = ArrivalPhase.ANSWER
        self.enter(ArrivalPhase.IDLE if known else ArrivalPhase.HEAD)

    def refuse(self, why: str) -> None:
        """Close the connection, and count it."""
        self.stop()
        self._phase = ArrivalPhase.ANSWER
        self._server.refusals.add(why)
        self._close()

    def stop(self) -> None:
        """Stop the clock: the connection is closed, or waits for nothing."""
        self._server.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        self._began_s, self._received, self._warned = self._loop.time(), 0, False
        self._timer = self._loop.call_later(self._server.head_s, self._look)

    def _look(self) -> None:
        if self._paused():
            self._begin()
            return
        allowed_s = self._server.head_s
        if self._phase is ArrivalPhase.BODY:
            allowed_s += self._received / self._server.least_bytes_s
        left_s = self._began_s + allowed_s - self._loop.time()
        if left_s <= 0 and self._warned:
            self.refuse(SLOW[self._phase] if self._received else SILENT)
            return
        self._warned = left_s <= 0
        self._timer = self._loop.call_later(GRACE_S if left_s <= 0 else left_s, self._look)
