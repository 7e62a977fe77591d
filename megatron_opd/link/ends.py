"""Opens links over ZeroMQ: a server that many peers reach by their keys, a client of one server.

Each connection of a client is a socket of its own, so that ZeroMQ keeps nothing for a connection
that is gone; what waits lies in sending.py. A server knows a peer by its key alone, and by the
greeting the connection on which it is spoken to. Messages of a key's older process are not heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from megatron_opd.config.sites import LinkConfig
from megatron_opd.link.counts import LinkCounts
from megatron_opd.link.events import Event, LinkRefused
from megatron_opd.link.inbox import Hold, Inbox
from megatron_opd.link.peer import Peer
from megatron_opd.link.sending import Breach
from megatron_opd.link.wire import (
    MAX_FRAME_EXTRA,
    PROCESS_BYTES,
    URGENT,
    Buffer,
    Hello,
    Refused,
    Welcome,
    note,
)
from megatron_opd.transport.gate import Gate, guard_socket, name_of, show_keys
from sglang_bridge.errors import one_line
from sglang_bridge.refusals import Refusals

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 256 << 20
"""Largest message unless a caller says otherwise."""
SERVER = "server"
"""What a client calls its only peer."""
FRAMES_WAITING = 16
"""Frames of a connection that wait for this process; then TCP holds the sender up."""
LEAVING_WAITING = 1024
LINGER_MS = 200
GREETING_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
FORMER_KEPT = 64
FLUSH_S = 0.01
CLIENT_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def _prepared(context: zmq.asyncio.Context, kind: int, settings: LinkConfig) -> zmq.asyncio.Socket:
    """Return a socket with limits: a peer can make this process hold so much and no more."""
    socket = context.socket(kind)
    guard_socket(socket, settings.chunk_bytes + MAX_FRAME_EXTRA)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.RCVHWM, FRAMES_WAITING)
    socket.set(zmq.SNDHWM, LEAVING_WAITING)
    # ours notice a break; ZeroMQ's only clear up connections that nobody speaks on
    socket.set(zmq.HEARTBEAT_IVL, round(settings.silence_s * 1000))
    socket.set(zmq.HEARTBEAT_TIMEOUT, round(settings.silence_s * 1000))
    return socket


def _put(socket: zmq.asyncio.Socket, frames: Sequence[Buffer]) -> bool:
    """Send without waiting; returns whether it could be."""
    sent = cast("asyncio.Future[Any]", socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False))
    return sent.exception() is None  # with NOBLOCK it is done


class _End:
    """Holds what both kinds of end have: an inbox, and one group of tasks."""

    def __init__(self, settings: LinkConfig, workers: int, name: str) -> None:
        self._settings = settings
        self._inbox = Inbox()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._process = secrets.token_bytes(PROCESS_BYTES)
        self._context = zmq.asyncio.Context()
        self._beat_s = min(settings.heartbeat_s, settings.silence_s) / 4
        self._closed = False

    def _start(self, name: str) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)
        self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        raise NotImplementedError

    def _all_peers(self) -> Sequence[Peer]:
        raise NotImplementedError

    async def next(self) -> Event:
        """Wait for the next event. LinkRefused: the link has ended for this process."""
        return await self._inbox.next()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._inbox.fail(error or LinkRefused("the link is closed"))
        for peer in self._all_peers():
            peer.wake()

    async def close(self, linger_s: float = 0.0) -> None:
        """Close, once what waits has arrived, or after `linger_s`. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger_s):
                while not self._task.done() and self._waits():
                    await asyncio.sleep(FLUSH_S)
        self._task.cancel()
        await asyncio.wait([self._task])
        self._inbox.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(linger=LINGER_MS)

    def _waits(self) -> bool:
        return any(peer.channel.connection and peer.channel.waiting_bytes
                   for peer in self._all_peers())  # fmt: skip


class LinkServer(_End):
    """Binds at once, inside a running event loop; `address` is what clients connect to.

    Args:
        address: tcp://host:port, * for any port.
        secret_key: of this end, in Z85.
        peers: public keys in Z85 of all who may connect, by name.
        settings: of the link.
        hold: see inbox.Hold; holds received messages back.
        message_bytes: largest message.
    """

    def __init__(
        self,
        address: str,
        secret_key: bytes,
        peers: Mapping[str, bytes],
        settings: LinkConfig,
        hold: Hold | None = None,
        *,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        super().__init__(settings, 4, "link server")
        self._refusals = Refusals(logger, "on the sites' socket")
        self._socket = _prepared(self._context, zmq.ROUTER, settings)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._gate = Gate(self._context, self._socket, secret_key, peers)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._gate.close()
            self._context.destroy(linger=0)
            raise ValueError(f"cannot listen on {address}: {error}") from None
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._peers = {
            name: Peer(name, self._process, settings, message_bytes, self._inbox, hold, self._pool)
            for name in peers
        }
        self._routes: dict[str, bytes] = {}
        self._former = {name: deque[bytes](maxlen=FORMER_KEPT) for name in peers}
        self._known: set[int] = set()
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

    async def _serve(self) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._gate.monitor, zmq.POLLIN)
        while True:
            await poller.poll()
            ended = await self._gate.ended()
            while await self._socket.poll(0):
                identity, *frames = await self._socket.recv_multipart(copy=False)
                if frames:
                    await self._take(identity.bytes, frames)
            for descriptor in ended:
                if descriptor not in self._known:
                    self._refusals.add("a connection that ended without a greeting")
                self._known.discard(descriptor)

    async def _take(self, route: bytes, frames: Sequence[zmq.Frame]) -> None:
        """Process one message of a peer, whom the gate knows by its key."""
        peer = self._peers[name_of(frames[0])]
        buffers = [frame.buffer for frame in frames]
        if self._routes.get(peer.name) == route:
            try:
                await peer.hear(buffers)
            except Breach as breach:
                self._banish(peer, route, str(breach))
            return
        record = peer.read(buffers)
        if not isinstance(record, Hello):
            peer.channel.tally.refuse("a frame of a connection that is not the newest")
            return
        self._known.add(int(cast(Any, frames[0].get(zmq.SRCFD))))
        self._greet(peer, route, record)

    def _greet(self, peer: Peer, route: bytes, hello: Hello) -> None:
        process, before = hello.report.process, peer.channel.peer
        if process in self._former[peer.name]:
            self._refuse(route, f"a newer process has the name {peer.name}")
            return
        if process == before and hello.number <= peer.number:
            return
        former = self._routes.pop(peer.name, None)
        try:
            peer.meet(hello.report, hello.number, lambda frames: self._send(peer, route, frames))
        except Breach as breach:
            self._banish(peer, route, str(breach))
            return
        if before and process != before:
            self._former[peer.name].append(before)
            if former is not None:
                self._refuse(former, f"a newer process has the name {peer.name}")
        self._routes[peer.name] = route
        _put(self._socket, [route, note(Welcome(peer.channel.report, hello.number), 0)])

    def _send(self, peer: Peer, route: bytes, frames: Sequence[Buffer]) -> None:
        if not _put(self._socket, [route, *frames]) and self._routes.get(peer.name) == route:
            del self._routes[peer.name]
            peer.leave()

    def _refuse(self, route: bytes, cause: str) -> None:
        _put(self._socket, [route, note(Refused(cause), 0)])

    def _banish(self, peer: Peer, route: bytes, cause: str) -> None:
        """Refuse everything more of a process that did what it must not."""
        self._routes.pop(peer.name, None)
        self._former[peer.name].append(peer.channel.peer)
        peer.leave()
        peer.channel.tally.refuse(cause)
        logger.warning("%s: %s; nothing more of this process is heard", peer.name, cause)
        self._refuse(route, cause)


class LinkClient(_End):
    """Connects to one server, again and again; make it inside a running event loop.

    Args:
        address: the server's.
        secret_key: of this end, in Z85.
        server_public_key: of the server, in Z85.
        settings: of the link.
        hold: see inbox.Hold; holds received messages back.
        message_bytes: largest message.
    """

    def __init__(
        self,
        address: str,
        secret_key: bytes,
        server_public_key: bytes,
        settings: LinkConfig,
        hold: Hold | None = None,
        *,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        super().__init__(settings, 2, "link client")
        self._address, self._secret, self._server = address, secret_key, server_public_key
        self._peer = Peer(
            SERVER, self._process, settings, message_bytes, self._inbox, hold, self._pool
        )
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
            socket = _prepared(self._context, zmq.DEALER, self._settings)
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
        _put(socket, [note(Hello(self._peer.channel.report, self._number), 0)])
        since_s = time.monotonic()
        while True:
            await poller.poll(int(self._beat_s * 1000) + 1)
            has_ended = await self._has_ended(monitor)
            while await socket.poll(0):
                await self._take(socket, await socket.recv_multipart(copy=False))
            silent_s = self._peer.tick()
            late = not self._greeted and time.monotonic() - since_s > GREETING_S
            if has_ended or late or (self._greeted and silent_s > self._settings.silence_s):
                return

    async def _take(self, socket: zmq.asyncio.Socket, frames: Sequence[zmq.Frame]) -> None:
        buffers = [frame.buffer for frame in frames]
        if self._greeted:
            try:
                await self._peer.hear(buffers)
            except Breach as breach:
                raise LinkRefused(f"the server: {breach}") from None
            return
        record = self._peer.read(buffers)
        if isinstance(record, Refused):
            raise LinkRefused(one_line(record.cause))
        if isinstance(record, Welcome) and record.number == self._number:
            try:
                self._peer.meet(record.report, self._number, lambda out: _put(socket, out))
            except Breach as breach:
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
