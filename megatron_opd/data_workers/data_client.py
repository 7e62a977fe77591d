"""Takes samples from data workers, on a rank of the learner that is the head of its model copy.

A connection that breaks is opened again, and asked for what is still missing: a broken connection
does not mean a lost worker. Answers to an earlier question never reach a later one, because they
would come over a connection that is closed by then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
import zmq

from megatron_opd.transport.samples import FRAMES
from megatron_opd.wire.dealer import Dealer, Disconnected
from megatron_opd.wire.keys import RankKeys
from megatron_opd.wire.sockets import PeerMessage, SocketLimits, wait_for_any
from sglang_bridge.errors import one_line

Frames = list[memoryview]

TRIES = 4
"""Connections that break or are refused one after another, before a worker is out of reach."""
FIRST_PAUSE_S = 0.05
"""The pause before the second of them; each further one is four times as long."""
CONNECT_MS = 3_000
"""The longest wait for a machine that does not answer at all."""


class CannotFetch(ConnectionError):
    """Reports in one line which worker does not give its samples, and why."""


def by_address(parts: Sequence[tuple[str, str, int]]) -> dict[str, list[str]]:
    """Return the keys to fetch from each worker, each once. parts: of messages.Train."""
    wanted: dict[str, dict[str, None]] = {}
    for address, key, _ in parts:
        if address:
            wanted.setdefault(address, {})[key] = None
    return {address: list(keys) for address, keys in wanted.items()}


def asked_key(
    address: str, missing: set[str], name: bytes | memoryview, frames: Sequence[memoryview]
) -> str:
    """Return the key of one message of a worker, and strike it off what was asked for.

    The message: a key, then the columns of its sample, or nothing. CannotFetch: it was not asked
    for, or is not whole.
    """
    key = bytes(name).decode("utf-8", "replace")
    if key not in missing or not frames or len(frames) % FRAMES:
        raise CannotFetch(f"{address} does not hold sample {one_line(key)}")
    missing.remove(key)
    return key


class DataClient:
    """Keeps a connection to every worker that was asked.

    keys: of the ranks, asked for once they are there. max_bytes: the largest frame that is
    accepted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._context = zmq.Context()
        self._connections: dict[str, _Connection] = {}

    def fetch(
        self, wanted: Mapping[str, Sequence[str]], keys: RankKeys, silent_s: float
    ) -> dict[str, Frames]:
        """Return the columns of samples by their keys.

        wanted: keys by the address of the worker that holds them. CannotFetch: a worker lacks one,
        gave nothing for `silent_s`, or is out of reach.
        """
        for address in self._connections.keys() - wanted.keys():
            self._connections.pop(address).close()
        found: dict[str, Frames] = {}
        try:
            for address, names in wanted.items():
                if address not in self._connections:
                    connection = _Connection(self._context, address, keys, self._max_bytes)
                    self._connections[address] = connection
                self._connections[address].ask(names, silent_s)
            while waiting := [each for each in self._connections.values() if each.missing]:
                _wait(waiting)
                for connection in waiting:
                    found |= connection.advance()
        except CannotFetch:
            self.disconnect()
            raise
        return found

    def disconnect(self) -> None:
        """Close every connection."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def close(self) -> None:
        """Close every connection, for good."""
        self.disconnect()
        self._context.term()


def _wait(connections: Sequence[_Connection]) -> None:
    """Return once something came or broke, or a connection's next moment is there."""
    left_s = min(connection.until_s for connection in connections) - time.monotonic()
    wait_for_any([each.dealer for each in connections if each.dealer is not None], left_s + 0.001)


class _Connection:
    """Holds the connection to one worker.

    missing: keys that were asked for and have not come. dealer: None between two connections.
    until_s: when there is something to do even if nothing comes (time.monotonic).
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: RankKeys, limit: int
    ) -> None:
        self._context, self._address, self._keys, self._limit = context, address, keys, limit
        self.missing: set[str] = set()
        self.dealer: Dealer | None = None
        self.until_s = self._silent_s = 0.0
        self._failures = 0  # in a row: any sample ends it

    def ask(self, names: Sequence[str], silent_s: float) -> None:
        """Ask for samples. silent_s: the longest time without one."""
        self.missing, self._silent_s = set(names), silent_s
        if self.dealer is not None and self.dealer.has_ended():  # since the last question
            self.close()
        self._send()

    def advance(self) -> dict[str, Frames]:
        """Return what has come, without waiting. CannotFetch."""
        if self.dealer is None:
            if time.monotonic() >= self.until_s:
                self._send()
            return {}
        found, broke = dict[str, Frames](), False
        while (event := self.dealer.next_now()) is not None:
            if isinstance(event, PeerMessage):
                name, *frames = event.buffers
                found[asked_key(self._address, self.missing, name, frames)] = frames
            broke = broke or isinstance(event, Disconnected)
        if found:
            self._failures, self.until_s = 0, time.monotonic() + self._silent_s
        if self.missing and broke:
            self._pause()
        elif self.missing and time.monotonic() >= self.until_s:
            raise CannotFetch(f"{self._address} gave nothing for {self._silent_s:g} s")
        return found

    def close(self) -> None:
        """Close the connection."""
        if self.dealer is not None:
            self.dealer.close()
            self.dealer = None

    def _send(self) -> None:
        """Ask for what is missing, over a new connection where there is none."""
        if self.dealer is None:
            self.dealer = Dealer(
                self._context,
                self._address,
                zmq.curve_public(self._keys.secret),  # a worker has the ranks' own key pair
                self._keys.secret,
                SocketLimits(self._limit),
                connect_ms=CONNECT_MS,
            )
        self.until_s = time.monotonic() + self._silent_s
        self.dealer.send([msgspec.msgpack.encode(sorted(self.missing))])

    def _pause(self) -> None:
        self._failures += 1
        if self._failures == TRIES:
            raise CannotFetch(
                f"{self._address} is out of reach: {TRIES} connections were refused or broke"
            )
        self.close()
        self.until_s = time.monotonic() + FIRST_PAUSE_S * 4 ** (self._failures - 1)
