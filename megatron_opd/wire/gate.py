"""Admits to a socket only peers whose public keys it was given, and says by name who they are.

Keys are checked while a connection is opened (ZMTP's CURVE mechanism, answered as in ZeroMQ's
RFC 27), so no message of a stranger is buffered or decoded. CURVE shows the peer that it found whom
it looked for, too, encrypts everything, and takes no recorded byte a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from megatron_opd.wire.receiving import received

ZAP_ADDRESS = "inproc://zeromq.zap.01"
HANDSHAKE_MS = 10_000
# A host that vanished is noticed after HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS. ZeroMQ's own threads
# send and answer heartbeats: a peer whose Python is busy is not taken for dead.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 6_000
# events handled before messages are read again: strangers that connect faster than they are counted
# would otherwise keep the learner waiting
EVENTS_A_TURN = 256
# addresses whose refusals are counted one by one; those of further ones are counted together
MAX_ADDRESSES = 256
OTHERS = "others"


def guard_socket(socket: zmq.Socket[Any], max_bytes: int) -> None:
    """Set what every ZeroMQ socket of ours has: limits and heartbeats."""
    socket.set(zmq.MAXMSGSIZE, max_bytes)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def show_keys(socket: zmq.Socket[Any], server: bytes, secret: bytes) -> None:
    """Make a socket that is about to connect show its key, to the holder of `server` alone.

    server: the public key of whom it connects to. secret: its own. Both in Z85.
    """
    socket.set(zmq.CURVE_SERVERKEY, server)
    socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    socket.set(zmq.CURVE_SECRETKEY, secret)


def name_of(frame: zmq.Frame) -> str:
    """Return the name of the peer that sent `frame`, as the socket's gate knows its key."""
    return str(frame.get("User-Id"))


@dataclass(eq=False, slots=True)
class _Connection:
    """Holds who is at the other end, once that is known."""

    peer: bytes | None = None


class Gate:
    """Guards `socket`; make it before the socket is bound, run `answer` as a task.

    Whose connections ended is told in three steps, again and again: `look` once the monitor is
    readable; take every message that is there, and `name` who sent one; then see who `ended`. So
    what a peer said last is heard before it is gone.

    monitor: readable when a connection began or ended, one that was refused too. refused: number of
    refused keys by the address that showed them.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        socket: zmq.Socket[Any],
        secret: bytes,
        peers: Mapping[str, bytes],
        accepted: Callable[[int], None] | None = None,
    ) -> None:
        """Guard `socket`, whose own secret key is `secret`.

        peers: public keys of those who are admitted, by name (see `name_of`). All keys in Z85.
        accepted: is told of the file descriptor of each new connection.
        """
        self._names = {z85.decode(key): name.encode() for name, key in peers.items()}
        self.refused: Counter[str] = Counter()
        self._zap = context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, secret)
        socket.set(zmq.ZAP_DOMAIN, b"gate")
        self._socket = socket
        # get_monitor_socket takes 2,000 events; then ZeroMQ's thread waits for this process to read
        # them, and sends no heartbeats meanwhile
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.set(zmq.RCVHWM, 0)
        address = f"inproc://monitor-{socket.fileno()}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.monitor.connect(address)
        self._accepted = accepted
        self._newest: dict[int, _Connection] = {}
        """By file descriptor, which a new connection has as soon as the one before it ended."""
        self._ended: list[_Connection] = []

    async def answer(self) -> None:
        """Admit or refuse every connection."""
        while True:
            version, request, _, address, _, mechanism, *shown = await self._zap.recv_multipart()
            key = shown[0] if mechanism == b"CURVE" and len(shown) == 1 else b""
            name = self._names.get(key)  # public keys: how long this takes is no secret
            if name is None:
                self._count(address.decode("ascii", "replace"))
            verdict = (
                (b"400", b"not a key of this run", b"") if name is None else (b"200", b"OK", name)
            )
            await self._zap.send_multipart([version, request, *verdict, b""])

    def _count(self, address: str) -> None:
        known = address in self.refused or len(self.refused) < MAX_ADDRESSES
        self.refused[address if known else OTHERS] += 1

    def look(self, most: int = EVENTS_A_TURN) -> int:
        """Read at most so many events; return how many there were."""
        for count in range(most):
            message = received(self.monitor)
            if message is None:
                return count
            event = parse_monitor_message([frame.bytes for frame in message])
            descriptor = event["value"]
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._ended.append(self._newest.setdefault(descriptor, _Connection()))
                continue
            self._newest[descriptor] = _Connection()
            if self._accepted is not None:
                self._accepted(descriptor)
        return most

    def name(self, frame: zmq.Frame, peer: bytes) -> None:
        """Note that `peer` is at the other end of the connection over which a frame has come.

        It may have ended since.
        """
        # a connection begins before anything comes over it: now its descriptor's newest is this one
        while self.look() == EVENTS_A_TURN:
            pass
        self._newest.setdefault(int(frame.get(zmq.SRCFD)), _Connection()).peer = peer

    def has_named(self, peer: bytes) -> bool:
        """Return whether a peer was named, of connections that are there and some that were."""
        return any(connection.peer == peer for connection in self._newest.values())

    def ended(self) -> list[bytes | None]:
        """Return who is at the other end of each connection that ended; None: never named."""
        ended, self._ended = self._ended, []
        return [connection.peer for connection in ended]

    def close(self) -> None:
        """Stop answering connections and close the gate's own sockets."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close(linger=0)
        self._zap.close(linger=0)
