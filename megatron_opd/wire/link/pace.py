"""Says how much to send at once, from what the link was seen to carry, and at most how fast."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from megatron_opd.wire.link.wire import BULK, LANES, MIN_CHUNK

CHUNK_S = 0.25
"""Time that a chunk should take on the link."""
FLIGHT_S = 0.5
"""Time for which bytes may be on their way without an acknowledgement."""
ROUND_TRIPS, PROCESSING_S = 5, 0.05
"""What must be on its way to keep the link busy: this many of the quickest round trip, and the time
that both ends take for a chunk. More of the bulk lane would only delay the urgent one."""
MAX_FLIGHT_BYTES = 64 << 20
MAX_FLIGHTS = 64
"""Chunks of a lane that may be on their way: small messages gather meanwhile."""
FIRST_CHUNK = 64 << 10
SAMPLES = 8
"""Measurements of the rate of which the best counts."""
BURST_S = 0.05
"""Time for which a token bucket saves what was not used."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """Notes a chunk on its way. full: there was more to send, so that it tells the link's rate.

    since_s: when the last bytes before it had arrived, or its own sending on an idle link.
    """

    stop: int
    since_s: float
    delivered: int
    full: bool


class Pace:
    """Measures the rate of acknowledged bytes, before compression, of both lanes together.

    Chunks begin small and double with each that arrives, up to what takes CHUNK_S; after a break
    without any progress they are a quarter as big, so that some get through.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._least_bytes = min(MIN_CHUNK, most_bytes)
        self._delivered, self._delivered_s = 0, 0.0
        self._flights = tuple(deque[_Flight]() for _ in LANES)
        self._rates = deque[float](maxlen=SAMPLES)
        self._reached = min(FIRST_CHUNK, most_bytes)
        self.rtt_s = FLIGHT_S
        """The quickest round trip of this connection, in seconds."""

    @property
    def rate(self) -> float:
        """Returns the measured bytes a second, 0 before there is a measurement."""
        return max(self._rates, default=0.0)

    @property
    def chunk_bytes(self) -> int:
        """Returns the size of the next chunk."""
        wanted = self.rate * CHUNK_S if self._rates else self._reached
        return int(min(max(wanted, self._least_bytes), self._reached))

    def may_send(self, lane: int, flying: int, room: int) -> bool:
        """Return whether another chunk may follow what is on its way in a lane, in bytes.

        room: what the other end takes.
        """
        if len(self._flights[lane]) >= MAX_FLIGHTS:
            return False
        limit = max(2 * self.chunk_bytes, min(self.rate * FLIGHT_S, MAX_FLIGHT_BYTES))
        if lane == BULK:
            busy_s = ROUND_TRIPS * self.rtt_s + PROCESSING_S
            limit = min(limit, max(1, self.rate * min(FLIGHT_S, busy_s)))
        return flying < min(limit, room)

    def sent(self, lane: int, stop: int, now_s: float, *, full: bool) -> None:
        """Note a chunk that is sent."""
        if not any(self._flights):
            self._delivered_s = now_s
        self._flights[lane].append(_Flight(stop, self._delivered_s, self._delivered, full))

    def told(self, lane: int, arrived: int, news: int, now_s: float) -> None:
        """Note that `news` bytes more have arrived, up to the place `arrived`."""
        self._delivered += news
        flights = self._flights[lane]
        while flights and flights[0].stop <= arrived:
            flight = flights.popleft()
            rate = (self._delivered - flight.delivered) / max(now_s - flight.since_s, 1e-6)
            # a chunk that was all there was says only that the link is not slower
            if flight.full or rate > self.rate:
                self._rates.append(rate)
            if flight.full:
                self._reached = min(2 * self._reached, self.most_bytes)
        if news:
            self._delivered_s = now_s

    def forget(self, lane: int) -> None:
        """Note that bytes are sent again: what is on its way tells no rate."""
        self._flights[lane].clear()

    def broke(self, *, progressed: bool) -> None:
        """Note that a connection ended. progressed: not without bytes that had to arrive."""
        self.rtt_s = FLIGHT_S
        for lane in LANES:
            self.forget(lane)
        if not progressed:
            self._reached = max(self._least_bytes, self.chunk_bytes // 4)


class TokenBucket:
    """Keeps the bytes that are sent below a rate. bytes_per_s: None for no limit.

    A chunk may be sent as soon as nothing is owed, and is owed then: who comes after it waits for
    this chunk alone.
    """

    def __init__(self, bytes_per_s: float | None, now_s: float) -> None:
        self._rate = bytes_per_s
        self._saved, self._at_s = 0.0, now_s

    def wait_s(self, now_s: float) -> float:
        """Return the seconds to wait before something is sent."""
        if self._rate is None:
            return 0.0
        earned = (now_s - self._at_s) * self._rate
        self._saved, self._at_s = min(self._saved + earned, self._rate * BURST_S), now_s
        # less than a byte is nothing: a time that rounding leaves would never pass
        return 0.0 if self._saved > -1 else -self._saved / self._rate

    def spend(self, num_bytes: int) -> None:
        """Note bytes that are sent."""
        self._saved -= num_bytes
