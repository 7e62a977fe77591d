"""Bytes to a port, as a stranger sends them: whole, without end, or one at a time."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

CHUNK = bytes(1 << 20)
CONNECT_S = 10.0
SHOWN = 60
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Door:
    """Where something listens."""

    host: str
    port: int

    def connect(self) -> socket.socket:
        """Open a connection."""
        return socket.create_connection((self.host, self.port), CONNECT_S)


@dataclass(frozen=True)
class Outcome:
    """What a stranger saw. closed: by the other side; sent: bytes that were taken from it."""

    connections: int
    sent: int
    seconds: float
    closed: bool
    answer: bytes = b""

    @property
    def status(self) -> int | None:
        """The HTTP status, None where the answer is none."""
        words = self.answer.split(b" ", 2)
        return int(words[1]) if words[0].startswith(b"HTTP/") and words[1].isdigit() else None

    @property
    def shown(self) -> str:
        """The answer's beginning, for the record."""
        return ascii(self.answer[:SHOWN])[2:-1]


def send(door: Door, data: bytes, wait_s: float = PATIENCE_S) -> Outcome:
    """Send everything, then read until the other side closes or `wait_s` have passed."""
    started = time.monotonic()
    with door.connect() as connection:
        sent = _sent(connection, data)
        answer, closed = _read(connection, wait_s)
    return Outcome(1, sent, time.monotonic() - started, closed, answer)


def send_and_leave(door: Door, data: bytes) -> Outcome:
    """Send everything and close at once."""
    started = time.monotonic()
    with door.connect() as connection:
        sent = _sent(connection, data)
    return Outcome(1, sent, time.monotonic() - started, closed=True)


def flood(
    door: Door, head: bytes, total: int, limit_s: float = 60.0, *, greeted: bool = False
) -> Outcome:
    """Send `head` and `total` bytes after it, until the other side closes or answers.

    greeted: the other side says something before it has heard anything, which is no answer.
    """
    started = time.monotonic()
    with door.connect() as connection:
        sent = _sent(connection, head)
        connection.settimeout(1.0)
        closed, answer = False, b""
        while sent < total and time.monotonic() - started < limit_s and not closed:
            taken = _sent(connection, CHUNK)
            sent += taken
            more, closed = _read(connection, 0.0)
            answer += more
            if answer and not greeted:
                break
            closed = closed or not taken
        if not (closed or (answer and not greeted)):
            more, closed = _read(connection, PATIENCE_S)
            answer += more
    return Outcome(1, sent, time.monotonic() - started, closed, answer)


def drip(door: Door, data: bytes, connections: int, every_s: float, limit_s: float) -> Outcome:
    """Hold many connections, each of which gets a byte of `data` every `every_s`."""
    started, sent = time.monotonic(), 0
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(door.connect()) for _ in range(connections)]
        letters: Iterator[int] = iter(data * 1000)
        while held and time.monotonic() - started < limit_s:
            letter = bytes([next(letters)])
            for connection in list(held):
                taken = _sent(connection, letter)
                sent += taken
                if not taken or _read(connection, 0.0)[1]:
                    held.remove(connection)
            time.sleep(every_s)
    return Outcome(connections, sent, time.monotonic() - started, closed=not held)


def hold(door: Door, connections: int, limit_s: float) -> Outcome:
    """Hold many connections on which nothing is sent, until the other side has closed them all."""
    started = time.monotonic()
    poller = select.poll()
    with contextlib.ExitStack() as stack:
        held: dict[int, socket.socket] = {}
        for _ in range(connections):
            connection = stack.enter_context(door.connect())
            held[connection.fileno()] = connection
            poller.register(connection, select.POLLIN)
        while held and time.monotonic() - started < limit_s:
            for fd, _ in poller.poll(1000):
                if _read(held[fd], 0.0)[1]:
                    poller.unregister(fd)
                    del held[fd]
    return Outcome(connections, 0, time.monotonic() - started, closed=not held)


def _sent(connection: socket.socket, data: bytes) -> int:
    """Send; the number of bytes that were taken."""
    sent, view = 0, memoryview(data)
    with contextlib.suppress(OSError):
        while sent < len(data):
            sent += connection.send(view[sent : sent + len(CHUNK)])
    return sent


def _read(connection: socket.socket, wait_s: float) -> tuple[bytes, bool]:
    """Read what comes within `wait_s`; whether the other side closed."""
    answer, until = bytearray(), time.monotonic() + wait_s
    while True:
        connection.settimeout(max(0.001, until - time.monotonic()))
        try:
            data = connection.recv(1 << 16)
        except TimeoutError:
            return bytes(answer), False
        except OSError:
            return bytes(answer), True
        if not data:
            return bytes(answer), True
        answer += data
        if time.monotonic() > until:
            return bytes(answer), False
