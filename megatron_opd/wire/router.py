"""Listens for peers whose keys it was given, and tells what they say and when they are gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import zmq

from megatron_opd.wire.gate import Gate
from megatron_opd.wire.sockets import Buffer, PeerMessage, SocketLimits, WireSocket


@dataclass(frozen=True, slots=True)
class PeerGone:
    """Says that the connection of a peer that has said something has ended."""

    route: bytes


@dataclass(frozen=True, slots=True)
class StrangerGone:
    """Says that a connection has ended over which no whole message came, as one refused does."""


@dataclass(eq=False, slots=True)
class _Connection:
    """Holds the route of who speaks over it, once that is known."""

    route: bytes | None = None


class Router(WireSocket[PeerGone | StrangerGone]):
    """Binds at once; peers connect to `address`. `next` also admits and refuses connections.

    Args:
        address: tcp://host:port, * for any port. ZMQError: it cannot be bound.
        secret: its own key, in Z85.
        peers: public keys in Z85 of those who are admitted, by name (see gate.name_of).
        limits: of every connection.
        together_s: see WireSocket.
        accepted: is told of the file descriptor of each new connection.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        peers: Mapping[str, bytes],
        limits: SocketLimits,
        *,
        together_s: float = 0.0,
        accepted: Callable[[int], None] | None = None,
    ) -> None:
        self._context = zmq.Context()  # its own, as a context has one gate
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        super().__init__(socket, limits, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED, together_s)
        self._gate = Gate(socket, secret, peers)
        self.keys_refused = self._gate.refused
        """Number of unknown keys by the address that showed them."""
        self._accepted = accepted
        self._newest: dict[int, _Connection] = {}
        """By file descriptor, which a new connection has as soon as the one before it ended."""
        self._descriptors: dict[bytes, int] = {}
        """Holds those of peers that have said something, by route."""
        self._ended = deque[_Connection]()
        try:
            socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        self.address = socket.get_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Returns what to poll before another `next_now`."""
        return [*super().sockets, self._gate.socket]

    def send(self, route: bytes, frames: Sequence[Buffer]) -> None:
        """Send a message, without waiting. ZMQError: its connection has ended, or too much waits.

        What is sent must not change before it has left.
        """
        self._send([route, *frames])

    def close(self, linger_ms: int = 0) -> None:
        """Close, once what was sent has left, or after `linger_ms`. Safe to call twice."""
        if not self._context.closed:
            self._close(linger_ms)
            self._gate.close()
            self._context.term()

    def _look(self) -> bool:
        self._gate.answer()
        return super()._look()

    def _note(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self._ended.append(self._newest.setdefault(descriptor, _Connection()))
            return
        self._newest[descriptor] = _Connection()
        if self._accepted is not None:
            self._accepted(descriptor)

    def _event(self) -> PeerGone | StrangerGone | None:
        if not self._ended:
            return None
        route = self._ended.popleft().route  # perhaps known only since its last message
        if route is None:
            return StrangerGone()
        self._descriptors.pop(route, None)
        return PeerGone(route)

    def _message(self, frames: list[zmq.Frame]) -> PeerMessage:
        identity, *rest = frames
        route, descriptor = identity.bytes, int(identity.get(zmq.SRCFD))
        if self._descriptors.get(route) != descriptor:
            # its connection began before this came, so that it is its descriptor's newest by now
            while self._look():
                pass
            self._newest.setdefault(descriptor, _Connection()).route = route
            self._descriptors[route] = descriptor
        return PeerMessage(rest, route)
