"""Takes samples from data workers, on a rank of the learner that is the head of its model copy.

A connection that breaks is opened again, and asked for what is still missing: a broken connection
does not mean a lost worker. Answers to an earlier question never reach a later one, because they
would come over a connection that is closed by then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_opd.transport.samples import FRAMES
from megatron_opd.wire.gate import guard_socket, show_keys
from megatron_opd.wire.keys import RankKeys
from megatron_opd.wire.receiving import received_now
from sglang_bridge.errors import one_line

Frames = list[memoryview]

TRIES = 4
"""Connections that break or are refused one after another, before a worker is out of reach."""
FIRST_PAUSE_S = 0.05
"""The pause before the second of them; each further one is four times as long."""
CONNECT_MS = 3_000
"""The longest wait for a machine that does not answer at all."""
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class CannotTake(ConnectionError):
    """Reports in one line which worker does not give its samples, and why."""


def by_address(parts: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the keys to take from each worker. parts: of messages.Train."""
    wanted: dict[str, list[str]] = {}
    for address, key in parts:
        if address:
            wanted.setdefault(address, []).append(key)
    return wanted


def taken(
    address: str, missing: set[str], name: bytes | memoryview, frames: Sequence[memoryview]
) -> str:
    """Return the key of one message of a worker, and strike it off what was asked for.

    The message: a key, then the columns of its sample, or nothing. CannotTake: it was not asked
    for, or is not whole.
    """
    key = bytes(name).decode("utf-8", "replace")
    if key not in missing or len(frames) != FRAMES:
        raise CannotTake(f"{address} does not hold sample {one_line(key)}")
    missing.remove(key)
    return key


class Taking:
    """Keeps a connection to every worker that was asked.

    keys: of the ranks, asked for once they are there. max_bytes: the largest frame that is
    accepted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._context = zmq.Context()
        self._sources: dict[str, _Source] = {}

    def take(
        self, wanted: Mapping[str, Sequence[str]], keys: RankKeys, silent_s: float
    ) -> dict[str, Frames]:
        """Return the columns of samples by their keys.

        wanted: keys by the address of the worker that holds them. CannotTake: a worker lacks one,
        gave nothing for `silent_s`, or is out of reach.
        """
        for address in self._sources.keys() - wanted.keys():
            self._sources.pop(address).close()
        found: dict[str, Frames] = {}
        try:
            for address, names in wanted.items():
                if address not in self._sources:
                    source = _Source(self._context, address, keys, self._max_bytes)
                    self._sources[address] = source
                self._sources[address].ask(names, silent_s)
            while waiting := [each for each in self._sources.values() if each.missing]:
                _wait(waiting)
                for source in waiting:
                    found |= source.advance()
        except CannotTake:
            self.close_sources()
            raise
        return found

    def close_sources(self) -> None:
        """Close every connection."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def close(self) -> None:
        """Close every connection, for good."""
        self.close_sources()
        self._context.term()


def _wait(sources: Sequence[_Source]) -> None:
    """Return once something came or broke, or a source's next moment is there."""
    poller = zmq.Poller()
    for source in sources:
        for socket in source.sockets:
            poller.register(socket, zmq.POLLIN)
    left_s = min(source.until_s for source in sources) - time.monotonic()
    poller.poll(max(0, int(left_s * 1000) + 1))


class _Source:
    """Holds the connection to one worker.

    missing: keys that were asked for and have not come. sockets: what to wait for; none between two
    connections. until_s: when there is something to do even if nothing comes (time.monotonic).
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: RankKeys, limit: int
    ) -> None:
        self._context, self._address, self._keys, self._limit = context, address, keys, limit
        self.missing: set[str] = set()
        self.sockets: list[Any] = []
        self.until_s = self._silent_s = 0.0
        self._failures = 0  # in a row: any sample ends it

    def ask(self, names: Sequence[str], silent_s: float) -> None:
        """Ask for samples. silent_s: the longest time without one."""
        self.missing, self._silent_s = set(names), silent_s
        if self.sockets and self._broke():  # since the last question, which was answered
            self.close()
        self._send()

    def advance(self) -> dict[str, Frames]:
        """Return what has come, without waiting. CannotTake."""
        if not self.sockets:
            if time.monotonic() >= self.until_s:
                self._send()
            return {}
        found: dict[str, Frames] = {}
        for name, frames in self._received():
            found[taken(self._address, self.missing, name, frames)] = frames
        if found:
            self._failures, self.until_s = 0, time.monotonic() + self._silent_s
        if self.missing and self._broke():
            self._pause()
        elif self.missing and time.monotonic() >= self.until_s:
            raise CannotTake(f"{self._address} gave nothing for {self._silent_s:g} s")
        return found

    def close(self) -> None:
        """Close the connection."""
        if self.sockets:
            socket, monitor = self.sockets
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
            self.sockets = []

    def _send(self) -> None:
        """Ask for what is missing, over a new connection where there is none."""
        if not self.sockets:
            socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, 0)
            socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            guard_socket(socket, self._limit)
            # a worker has the ranks' own key pair
            show_keys(socket, zmq.curve_public(self._keys.secret), self._keys.secret)
            self.sockets = [socket, socket.get_monitor_socket(_LOST)]
            socket.connect(self._address)
        self.until_s = time.monotonic() + self._silent_s
        self.sockets[0].send(msgspec.msgpack.encode(sorted(self.missing)))

    def _pause(self) -> None:
        self._failures += 1
        if self._failures == TRIES:
            raise CannotTake(
                f"{self._address} is out of reach: {TRIES} connections were refused or broke"
            )
        self.close()
        self.until_s = time.monotonic() + FIRST_PAUSE_S * 4 ** (self._failures - 1)

    def _received(self) -> list[tuple[memoryview, Frames]]:
        socket, found = self.sockets[0], list[tuple[memoryview, Frames]]()
        while (message := received_now(socket)) is not None:
            name, *frames = (frame.buffer for frame in message)
            found.append((name, frames))
        return found

    def _broke(self) -> bool:
        """Return whether the connection ended or was refused."""
        monitor, ended = self.sockets[1], False
        while monitor.poll(0):
            ended = bool(recv_monitor_message(monitor)["event"] & _LOST) or ended
        return ended
