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

        wanted: keys by the address of the worker that holds them.
        """
        for address in self._sources.keys() - wanted.keys():
            self._sources.pop(address).close()
        missing = {key for names in wanted.values() for key in names}
        found: dict[str, Frames] = {}
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
        whole = True
        while missing and whole:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poller.poll(int(left_s * 1000) + 1):
                whole = False
            for address in wanted:
                source = self._sources[address]
                for key, frames in source.received():
                    if key in missing and frames:
                        found[key] = frames
                        missing.discard(key)
                    else:
                        whole = whole and key not in missing
                held = any(key in missing for key in wanted[address])
                whole = whole and not (source.lost() and held)
        if whole:
            return found
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

    def received(self) -> list[tuple[str, Frames]]:
        """Return what has come, without waiting: keys and columns."""
        found: list[tuple[str, Frames]] = []
        while self.socket.poll(0):
            name, *frames = (frame.buffer for frame in self.socket.recv_multipart(copy=False))
            found.append((bytes(name).decode("utf-8", "replace"), frames))
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
