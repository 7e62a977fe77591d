"""Cuts connections whose peer sends a message without end.

ZeroMQ bounds the size of a frame and the number of whole messages that wait, and keeps the frames
of a message until the last has come, however many. So what has come over a connection since its
last whole message is compared with what one message and the buffers before it may hold. The kernel
counts those bytes; where it does not (not Linux), nothing is cut.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

BYTES_RECEIVED_AT = 128
"""Offset of tcpi_bytes_received in Linux's struct tcp_info."""
FIELD = struct.Struct("=Q")
BUFFERS_BYTES = 64 << 20
"""More than the kernel's receive buffers hold."""


@dataclass(slots=True)
class _Connection:
    """Holds what is known of one connection.

    address: of the peer. mark: bytes that had come when a whole message last had. has_spoken: a
    whole message has come since the last look.
    """

    address: object
    mark: int = 0
    has_spoken: bool = False


class Flood:
    """Watches the connections of a server by their file descriptors.

    Args:
        most_bytes: that may come over a connection without a whole message.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._connections: dict[int, _Connection] = {}

    def begins(self, descriptor: int) -> None:
        """Note a new connection."""
        found = _opened(descriptor)
        if found is not None:
            with found:
                self._connections[descriptor] = _Connection(_address(found))

    def speaks(self, descriptor: int) -> None:
        """Note a whole message."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.has_spoken = True

    def cut(self) -> int:
        """Cut the connections over which too much has come; returns how many. Call often."""
        return sum(self._cut(*each) for each in list(self._connections.items()))

    def _cut(self, descriptor: int, connection: _Connection) -> bool:
        found = _opened(descriptor)
        if found is None:
            del self._connections[descriptor]
            return False
        with found:
            if _address(found) != connection.address:  # it has ended, another file has its number
                del self._connections[descriptor]
                return False
            received = _bytes_received(found)
            if connection.has_spoken:
                connection.mark, connection.has_spoken = received, False
            if received - connection.mark <= self._most_bytes:
                return False
            del self._connections[descriptor]
            try:
                found.shutdown(socket.SHUT_RDWR)
            except OSError:
                return False  # the peer was quicker
            return True


def _opened(descriptor: int) -> socket.socket | None:
    """Return a socket of ours for a descriptor of ZeroMQ's; None: it is none any more."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _address(connection: socket.socket) -> object:
    try:
        return connection.getpeername()
    except OSError:
        return None


def _bytes_received(connection: socket.socket) -> int:
    """Return how many bytes have come, 0 where the kernel does not say."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, option, BYTES_RECEIVED_AT + FIELD.size)
    except OSError:
        return 0
    if len(info) < BYTES_RECEIVED_AT + FIELD.size:
        return 0
    return FIELD.unpack_from(info, BYTES_RECEIVED_AT)[0]
