"""Opens links over ZeroMQ: a server that many peers reach by their keys, a client of one server.

Each connection of a client is a socket of its own, so that ZeroMQ keeps nothing for a connection
that is gone; what waits lies in sending.py.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from megatron_opd.config.sites import LinkConfig
from megatron_opd.wire.gate import Gate, name_of, show_keys
from megatron_opd.wire.link.counts import LinkCounts
from megatron_opd.wire.link.end import End
from megatron_opd.wire.link.events import LinkRefused
from megatron_opd.wire.link.flood import BUFFERS_BYTES, Flood
from megatron_opd.wire.link.peer import Peer
from megatron_opd.wire.link.routes import Greeting, Routes
from megatron_opd.wire.link.sending import LinkBreach
from megatron_opd.wire.link.sockets import FRAMES_WAITING, prepared, put
from megatron_opd.wire.link.wire import (
    MAX_FRAME_EXTRA,
    URGENT,
    Buffer,
    LinkHello,
    LinkWelcome,
    RefusalNote,
    note,
)
from megatron_opd.wire.receiving import received
from sglang_bridge.errors import one_line
from sglang_bridge.refusals import Refusals

logger = logging.getLogger(__name__)

NOT_NEWEST = "a frame of a connection that is not the newest"
MESSAGE_BYTES = 256 << 20
"""Largest message unless a caller says otherwise."""
SERVER = "server"
"""What a client calls its only peer."""
GREETING_S = 10.0
"""Time within which a connection must be greeted."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
"""Times between two attempts to connect; each doubles the one before."""
CLIENT_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class LinkServer(End):
    """Binds at once, inside a running event loop; `address` is what clients connect to.

    Args:
        address: tcp://host:port, * for any port.
        secret_key: of this end, in Z85.
        peers: public keys in Z85 of all who may connect, by name.
        settings: of the link.
        message_bytes: largest message.
    """

    def __init__(
        self,
        address: str,
        secret_key: bytes,
        peers: Mapping[str, bytes],
        settings: LinkConfig,
        *,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        super().__init__(settings, 4, "link server")
        self._refusals = Refusals(logger, "on the sites' socket")
        self._socket = prepared(self._context, zmq.ROUTER, settings)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        frame_bytes = settings.chunk_bytes + MAX_FRAME_EXTRA
        self._flood = Flood(2 * (FRAMES_WAITING + 1) * frame_bytes + BUFFERS_BYTES)
        self._gate = Gate(self._context, self._socket, secret_key, peers, self._flood.begins)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._gate.close()
            self._context.destroy(linger=0)
            raise ValueError(f"cannot listen on {address}: {error}") from None
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._peers = {
            name: Peer(name, self._process, settings, message_bytes, self._inbox, self._pool)
            for name in peers
        }
        self._routes = Routes(list(peers))
        self._start("link server")

    @property
    def connections_refused(self) -> int:
        """Returns the number of connections that ended without a greeting, of strangers mostly."""
        return self._refusals.count

    @property
    def keys_refused(self) -> dict[str, int]:
        """Returns the number of unknown keys by the address that showed them."""
        return dict(self._gate.refused)

    async def send(self, peer: str, parts: Sequence[Buffer], lane: int = URGENT) -> None:
        """Send a message; waits while more than outbox_bytes wait. It must not be changed then.

        ValueError: it is larger than this end or the other allows.
        """
        await self._peers[peer].send(parts, lane)

    def counts(self, peer: str) -> LinkCounts:
        """Return how the link to a peer does."""
        return self._peers[peer].counts()

    def _all_peers(self) -> Sequence[Peer]:
        return list(self._peers.values())

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._gate.answer(), name="link gate")
                group.create_task(self._serve(), name="link messages")
                group.create_task(self._beat(), name="link heartbeats")
                for peer in self._peers.values():
                    group.create_task(peer.pump(), name=f"link to {peer.name}")
        finally:
            self._gate.close()
            self._socket.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            for peer in self._peers.values():
                peer.tick()
            for _ in range(self._flood.cut()):
                self._refusals.add("a connection over which a message without end came")

    async def _serve(self) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._gate.monitor, zmq.POLLIN)
        while True:
            await poller.poll()
            self._gate.look()
            while (message := received(self._socket)) is not None:
                identity, *frames = message
                if frames:
                    self._flood.speaks(int(cast(Any, frames[0].get(zmq.SRCFD))))
                    await self._take(identity.bytes, frames)
            for peer in self._gate.ended():
                if peer is None:
                    self._refusals.add("a connection that ended without a greeting")

    async def _take(self, route: bytes, frames: Sequence[zmq.Frame]) -> None:
        """Process one message of a peer, whom the gate knows by its key."""
        peer = self._peers[name_of(frames[0])]
        buffers = [frame.buffer for frame in frames]
        if self._routes.is_on(peer.name, route):
            try:
                if await peer.hear(buffers) is not None:
                    raise LinkBreach("it refuses its server")
            except LinkBreach as breach:
                self._banish(peer, peer.channel.peer, route, str(breach))
            return
        if len(buffers) > 1:
            peer.channel.tally.refuse(NOT_NEWEST)
            return
        record = peer.read(buffers)
        if isinstance(record, LinkHello):
            self._gate.name(frames[0], route)
            self._greet(peer, route, record)
        elif record is not None:
            peer.channel.tally.refuse(NOT_NEWEST)

    def _greet(self, peer: Peer, route: bytes, hello: LinkHello) -> None:
        process, number = hello.report.process, hello.number
        greeting = self._routes.greet(peer.name, process, number)
        if greeting is Greeting.FORMER:
            self._refuse(route, f"a newer process has the name {peer.name}")
        if greeting is not Greeting.NEW:
            return
        try:
            peer.meet(hello.report, number, lambda frames: self._send(peer, route, frames))
        except LinkBreach as breach:
            self._banish(peer, process, route, str(breach))
            return
        former = self._routes.put(peer.name, process, number, route)
        if former is not None:
            self._refuse(former, f"a newer process has the name {peer.name}")
        put(self._socket, [route, note(LinkWelcome(peer.channel.report, number), 0)])

    def _send(self, peer: Peer, route: bytes, frames: Sequence[Buffer]) -> None:
        if not put(self._socket, [route, *frames]) and self._routes.end(peer.name, route):
            peer.leave()

    def _refuse(self, route: bytes, cause: str) -> None:
        put(self._socket, [route, note(RefusalNote(cause), 0)])

    def _banish(self, peer: Peer, process: bytes, route: bytes, cause: str) -> None:
        """Refuse everything more of a process that did what it must not."""
        self._routes.banish(peer.name, process)
        peer.leave()
        peer.channel.tally.refuse(cause)
        logger.warning("%s: %s; nothing more of this process is heard", peer.name, cause)
        self._refuse(route, cause)


class LinkClient(End):
    """Connects to one server, again and again; make it inside a running event loop.

    Args:
        address: the server's.
        secret_key: of this end, in Z85.
        server_public_key: of the server, in Z85.
        settings: of the link.
        message_bytes: largest message.
    """

    def __init__(
        self,
        address: str,
        secret_key: bytes,
        server_public_key: bytes,
        settings: LinkConfig,
        *,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        super().__init__(settings, 2, "link client")
        self._address, self._secret, self._server = address, secret_key, server_public_key
        self._peer = Peer(SERVER, self._process, settings, message_bytes, self._inbox, self._pool)
        self._number = 0
        self._greeted = False
        self._start("link client")

    async def send(self, parts: Sequence[Buffer], lane: int = URGENT) -> None:
        """Send a message; waits while more than outbox_bytes wait. It must not be changed then.

        ValueError: it is larger than this end or the other allows.
        """
        await self._peer.send(parts, lane)

    def counts(self) -> LinkCounts:
        """Return how the link does."""
        return self._peer.counts()

    def _all_peers(self) -> Sequence[Peer]:
        return [self._peer]

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._peer.pump(), name="link to the server")
            group.create_task(self._connect(), name="link connections")

    async def _connect(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            self._greeted = False
            socket = prepared(self._context, zmq.DEALER, self._settings)
            socket.set(zmq.RECONNECT_IVL, -1)
            show_keys(socket, self._server, self._secret)
            monitor = socket.get_monitor_socket(CLIENT_EVENTS)
            try:
                await self._serve(socket, cast(zmq.asyncio.Socket, monitor))
            finally:
                self._peer.leave()
                socket.disable_monitor()
                monitor.close(linger=0)
                socket.close(linger=0)
            pause_s = FIRST_PAUSE_S if self._greeted else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _serve(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        """Talk over one connection until it is of no use any more."""
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        socket.connect(self._address)
        self._number += 1
        put(socket, [note(LinkHello(self._peer.channel.report, self._number), 0)])
        since_s = time.monotonic()
        while True:
            await poller.poll(int(self._beat_s * 1000) + 1)
            has_ended = await self._has_ended(monitor)
            while (frames := received(socket)) is not None:
                await self._take(socket, frames)
                if not self._greeted:  # the Welcome comes first, so it was damaged or lost
                    return
            silent_s = self._peer.tick()
            late = not self._greeted and time.monotonic() - since_s > GREETING_S
            if has_ended or late or (self._greeted and silent_s > self._settings.silence_s):
                return

    async def _take(self, socket: zmq.asyncio.Socket, frames: Sequence[zmq.Frame]) -> None:
        buffers = [frame.buffer for frame in frames]
        if self._greeted:
            try:
                refused = await self._peer.hear(buffers)
            except LinkBreach as breach:
                raise LinkRefused(f"the server: {breach}") from None
            if refused is not None:
                raise LinkRefused(one_line(refused.cause))
            return
        record = self._peer.read(buffers)
        if isinstance(record, RefusalNote):
            raise LinkRefused(one_line(record.cause))
        if isinstance(record, LinkWelcome) and record.number == self._number:
            try:
                self._peer.meet(record.report, self._number, lambda out: put(socket, out))
            except LinkBreach as breach:
                raise LinkRefused(f"the server: {breach}") from None
            self._greeted = True

    async def _has_ended(self, monitor: zmq.asyncio.Socket) -> bool:
        """Return whether the connection is gone. LinkRefused: the server never knew our key."""
        found = False
        while await monitor.poll(0):
            event = await cast(Awaitable[Any], recv_monitor_message(monitor))
            found = True
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH and not self._peer.channel.peer:
                raise LinkRefused("the server does not know this key")
        return found
