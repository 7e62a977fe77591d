"""Takes samples from data workers, on a rank of the learner that is the head of its model copy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_opd.transport.gate import guard_socket, show_keys
from megatron_opd.transport.keys import RankKeys
from megatron_opd.transport.samples import FRAMES

Frames = list[memoryview]

_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


def by_address(parts: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the keys to take from each worker. parts: of messages.Train."""
    wanted: dict[str, list[str]] = {}
    for address, key in parts:
        if address:
            wanted.setdefault(address, []).append(key)
    return wanted


class Parts:
    """Gathers what workers give of a share. wanted: as of Taking.take.

    found: frames by key. sound: whether all that came was asked for, and is whole.
    """

    def __init__(self, wanted: Mapping[str, Sequence[str]]) -> None:
        self._missing = {address: set(names) for address, names in wanted.items()}
        self.found: dict[str, Frames] = {}
        self.sound = True

    @property
    def lacking(self) -> bool:
        """Returns whether more must come."""
        return any(self._missing.values())

    def add(self, address: str, name: bytes | memoryview, frames: Frames) -> None:
        """Take one message of a worker: a key, then the columns of its sample, or nothing."""
        key = bytes(name).decode("utf-8", "replace")
        if key not in self._missing.get(address, ()) or len(frames) != FRAMES:
            self.sound = False
            return
        self._missing[address].remove(key)
        self.found[key] = frames

    def end(self, address: str) -> None:
        """Note that a worker gives no more."""
        self.sound = self.sound and not self._missing[address]


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
        self, wanted: Mapping[str, Sequence[str]], keys: RankKeys, limit_s: float
    ) -> dict[str, Frames] | None:
        """Return the columns of samples by their keys; None: not all of them are to be had.

        wanted: keys by the address of the worker that holds them. A worker that gives what it was
        not asked for gives none.
        """
        for address in self._sources.keys() - wanted.keys():
            self._sources.pop(address).close()
        parts = Parts(wanted)
        poller = zmq.Poller()
        for address, names in wanted.items():
            source = self._sources.get(address)
            if source is None:
                source = _Source(self._context, address, keys, self._max_bytes)
                self._sources[address] = source
            poller.register(source.socket, zmq.POLLIN)
            poller.register(source.monitor, zmq.POLLIN)
            source.socket.send(msgspec.msgpack.encode(list(names)))
        deadline_s = time.monotonic() + limit_s
        while parts.sound and parts.lacking:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poller.poll(int(left_s * 1000) + 1):
                break
            for address in wanted:
                source = self._sources[address]
                for key, frames in source.received():
                    parts.add(address, key, frames)
                if source.lost():
                    parts.end(address)
        if parts.sound and not parts.lacking:
            return parts.found
        self.close_sources()  # answers to this question would come with those to the next
        return None

    def close_sources(self) -> None:
        """Close every connection."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def close(self) -> None:
        """Close every connection, for good."""
        self.close_sources()
        self._context.term()


class _Source:
    """Holds the connection to one worker."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: RankKeys, limit: int
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, 0)
        guard_socket(self.socket, limit)
        # a worker has the ranks' own key pair
        show_keys(self.socket, zmq.curve_public(keys.secret), keys.secret)
        self.monitor: Any = self.socket.get_monitor_socket(_LOST)
        self.socket.connect(address)

    def received(self) -> list[tuple[memoryview, Frames]]:
        """Return what has come, without waiting: keys and columns."""
        found: list[tuple[memoryview, Frames]] = []
        while self.socket.poll(0):
            name, *frames = (frame.buffer for frame in self.socket.recv_multipart(copy=False))
            found.append((name, frames))
        return found

    def lost(self) -> bool:
        """Return whether the connection ended or was refused."""
        ended = False
        while self.monitor.poll(0):
            ended = bool(recv_monitor_message(self.monitor)["event"] & _LOST) or ended
        return ended

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
