"""Admits to the controller's socket only peers that have the learner's key of this run.

Keys are checked while a connection is opened (ZMTP's CURVE mechanism, answered as in ZeroMQ's
RFC 27), so no message of a stranger is buffered or decoded. CURVE shows the learner that this is
its controller too, encrypts everything, and takes no recorded byte a second time.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable
from typing import Any, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from megatron_opd.transport.keys import RunKeys

ZAP_ADDRESS = "inproc://zeromq.zap.01"
HANDSHAKE_MS = 10_000
# A host that vanished is noticed after HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS. ZeroMQ's own threads
# send and answer heartbeats: a peer whose Python is busy is not taken for dead.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 6_000
# ended connections handled before messages are read again: strangers that connect faster than they
# are counted would otherwise keep the learner waiting
EVENTS_A_TURN = 256


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


class Gate:
    """Guards `socket`; make it before the socket is bound, run `answer` as a task.

    monitor: readable when a connection ended, one that was refused too; see `ended`.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        socket: zmq.Socket[Any],
        keys: RunKeys,
    ) -> None:
        self._learner = keys.learner_public
        self._zap = context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.controller)
        socket.set(zmq.ZAP_DOMAIN, b"learner")
        self._socket = socket
        # get_monitor_socket takes 2,000 events; then ZeroMQ's thread waits for this process to read
        # them, and sends no heartbeats meanwhile
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.set(zmq.RCVHWM, 0)
        address = f"inproc://monitor-{socket.fileno()}"
        socket.monitor(address, zmq.EVENT_DISCONNECTED)
        self.monitor.connect(address)

    async def answer(self) -> None:
        """Admit or refuse every connection."""
        while True:
            version, request, _, address, _, mechanism, *shown = await self._zap.recv_multipart()
            key = shown[0] if mechanism == b"CURVE" and len(shown) == 1 else b""
            known = hmac.compare_digest(key, self._learner)
            verdict = (b"200", b"OK", address) if known else (b"400", b"not this run's key", b"")
            await self._zap.send_multipart([version, request, *verdict, b""])

    async def ended(self) -> list[int]:
        """Return file descriptors of ended connections, without waiting; at most EVENTS_A_TURN."""
        descriptors: list[int] = []
        for _ in range(EVENTS_A_TURN):
            if not await self.monitor.poll(0):
                break
            event = await cast(Awaitable[Any], recv_monitor_message(self.monitor))
            descriptors.append(event["value"])
        return descriptors

    def close(self) -> None:
        """Stop answering connections and close the gate's own sockets."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close(linger=0)
        self._zap.close(linger=0)
