"""Connects to one listening peer, and tells what it says and what becomes of the connection."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_opd.wire.gate import show_keys
from megatron_opd.wire.sockets import Buffer, PeerMessage, SocketLimits, WireSocket


class LostHow(Enum):
    """Says how there came to be no connection."""

    ENDED = int(zmq.EVENT_DISCONNECTED)
    KEY_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    """The peer does not know our key."""
    KEY_UNKNOWN = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    """It could not read our first message, which only the owner of the key that we hold could."""
    MALFORMED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    """Its answer to our key cannot be read."""
    UNREACHED = int(zmq.EVENT_CLOSED)
    """Nobody answers at the address."""


LOST = sum(how.value for how in LostHow)
EVENTS = LOST | int(zmq.EVENT_HANDSHAKE_SUCCEEDED) | int(zmq.EVENT_MONITOR_STOPPED)


@dataclass(frozen=True, slots=True)
class Connected:
    """Says that both ends have shown their keys."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Says that there is no connection (any more). One that was refused has ended, too."""

    how: LostHow


ENDED = Disconnected(LostHow.ENDED)


class Dealer(WireSocket[Connected | Disconnected]):
    """Connects at once, and again after a break unless told otherwise.

    Args:
        context: of its sockets; who made it ends it.
        address: tcp://host:port.
        server: public key of the peer, in Z85.
        secret: its own key, in Z85.
        limits: of the connection.
        reconnects: whether ZeroMQ opens another connection, with the same keys, after a break.
        connect_ms: longest wait for a machine that does not answer at all; 0: the kernel's.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        server: bytes,
        secret: bytes,
        limits: SocketLimits,
        *,
        reconnects: bool = True,
        connect_ms: int = 0,
    ) -> None:
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.CONNECT_TIMEOUT, connect_ms)
        if not reconnects:
            socket.set(zmq.RECONNECT_IVL, -1)
        show_keys(socket, server, secret)
        super().__init__(socket, limits, EVENTS)
        self._kept = deque[Connected | Disconnected]()
        self._watcher: threading.Thread | None = None
        socket.connect(address)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message, without waiting; it is lost if there is no connection, or too much waits.

        What is sent must not change before it has left.
        """
        with contextlib.suppress(zmq.Again):
            self._send(frames)

    def receive(self) -> list[memoryview]:
        """Wait for the next message, in a thread that has nothing else to do."""
        return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]

    def has_ended(self) -> bool:
        """Return whether the connection has ended, whatever of it is still to be read."""
        self._look()
        return any(isinstance(event, Disconnected) for event in self._kept)

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` once the connection has ended, or if it has, from a thread of its own.

        From now on only `receive` and `send` may be called, until `close`.
        """

        def until_closed() -> None:
            while self._event() != ENDED:
                event = recv_monitor_message(self._monitor)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                self._note(event["event"], event["value"])
            ended()

        self._watcher = threading.Thread(target=until_closed, name="connection", daemon=True)
        self._watcher.start()

    def close(self, linger_ms: int = 0) -> None:
        """Close; what was sent leaves until its context ends, for at most `linger_ms`.

        Safe to call twice.
        """
        if self.closed:
            return
        self._socket.disable_monitor()
        if self._watcher is not None:
            self._watcher.join()
        self._close(linger_ms)

    def _message(self, frames: list[zmq.Frame]) -> PeerMessage:
        return PeerMessage(frames)

    def _note(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._kept.append(Connected())
        elif event & LOST:
            self._kept.append(Disconnected(LostHow(event)))

    def _event(self) -> Connected | Disconnected | None:
        return self._kept.popleft() if self._kept else None
