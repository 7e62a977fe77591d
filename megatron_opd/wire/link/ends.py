"""Opens links over ZeroMQ: a server that many peers reach by their keys, a client of one server.

Each connection of a client is a socket of its own, so that ZeroMQ keeps nothing for a connection
that is gone; what waits lies in sending.py.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence

import zmq

from megatron_opd.config.sites import LinkConfig
from megatron_opd.wire.dealer import Connected, Dealer, Disconnected, LostHow
from megatron_opd.wire.gate import name_of
from megatron_opd.wire.link.counts import LinkCounts
from megatron_opd.wire.link.end import End
from megatron_opd.wire.link.events import LinkRefused
from megatron_opd.wire.link.flood import BUFFERS_BYTES, Flood
from megatron_opd.wire.link.peer import Peer
from megatron_opd.wire.link.routes import Greeting, Routes
from megatron_opd.wire.link.sending import LinkBreach
from megatron_opd.wire.link.wire import (
    MAX_FRAME_EXTRA,
    URGENT,
    Buffer,
    LinkHello,
    LinkWelcome,
    RefusalNote,
    note,
)
from megatron_opd.wire.router import PeerGone, Router, StrangerGone
from megatron_opd.wire.sockets import PeerMessage, SocketLimits
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
FRAMES_WAITING = 16
"""Messages of a connection that wait for this process; then TCP holds the sender up."""
LEAVING_WAITING = 1024
"""Messages to a peer that wait for TCP. Far fewer are ever on their way to one that reads."""
LINGER_MS = 200


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
        limits = limits_of(settings)
        self._flood = Flood(2 * (limits.waiting_in + 1) * limits.frame_bytes + BUFFERS_BYTES)
        try:
            self._router = Router(address, secret_key, peers, limits, accepted=self._flood.begins)
        except zmq.ZMQError as error:
            raise ValueError(f"cannot listen on {address}: {error}") from None
        self.address = self._router.address
        self._peers = {
            name: Peer(name, self._process, settings, message_bytes, self._inbox, self._pool)
            for name in peers
        }
        self._routes = Routes(list(peers))
        self._greeted: set[bytes] = set()
        """Routes over which a greeting came, until their connections end."""
        self._start("link server")

    @property
    def connections_refused(self) -> int:
        """Returns the number of connections that ended without a greeting, of strangers mostly."""
        return self._refusals.count

    @property
    def keys_refused(self) -> dict[str, int]:
        """Returns the number of unknown keys by the address that showed them."""
        return dict(self._router.keys_refused)

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
        async with asyncio.TaskGroup() as group:
            group.create_task(self._serve(), name="link messages")
            group.create_task(self._beat(), name="link heartbeats")
            for peer in self._peers.values():
                group.create_task(peer.pump(), name=f"link to {peer.name}")

    def _close_sockets(self) -> None:
        self._router.close(LINGER_MS)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            for peer in self._peers.values():
                peer.tick()
            for _ in range(self._flood.cut()):
                self._refusals.add("a connection over which a message without end came")

    async def _serve(self) -> None:
        while True:
            match await self._router.next():
                case PeerMessage(frames, route):
                    if frames:
                        self._flood.speaks(int(frames[0].get(zmq.SRCFD)))
                        await self._take(route, frames)
                case PeerGone(route) if route in self._greeted:
                    self._greeted.remove(route)
                case PeerGone() | StrangerGone():
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
            self._greeted.add(route)
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
        self._put(route, [note(LinkWelcome(peer.channel.report, number), 0)])

    def _send(self, peer: Peer, route: bytes, frames: Sequence[Buffer]) -> None:
        if not self._put(route, frames) and self._routes.end(peer.name, route):
            peer.leave()

    def _refuse(self, route: bytes, cause: str) -> None:
        self._put(route, [note(RefusalNote(cause), 0)])

    def _put(self, route: bytes, frames: Sequence[Buffer]) -> bool:
        """Send; returns whether it could be: the connection is there, and not too much waits."""
        try:
            self._router.send(route, frames)
        except zmq.ZMQError:
            return False
        return True

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
        self._context = zmq.Context()
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

    def _close_sockets(self) -> None:
        self._context.term()

    async def _connect(self) -> None:
        pause_s, limits = FIRST_PAUSE_S, limits_of(self._settings)
        while True:
            self._greeted = False
            ours = (self._address, self._server, self._secret)
            dealer = Dealer(self._context, *ours, limits, reconnects=False)
            try:
                await self._serve(dealer)
            finally:
                self._peer.leave()
                dealer.close()
            pause_s = FIRST_PAUSE_S if self._greeted else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _serve(self, dealer: Dealer) -> None:
        """Talk over one connection until it is of no use any more."""
        self._number += 1
        dealer.send([note(LinkHello(self._peer.channel.report, self._number), 0)])
        since_s = time.monotonic()
        while True:
            match await dealer.next(self._beat_s):
                case PeerMessage() as message:
                    await self._take(dealer, message.buffers)
                    if not self._greeted:  # the Welcome comes first, so it was damaged or lost
                        return
                case Disconnected(LostHow.KEY_REFUSED) if not self._peer.channel.peer:
                    raise LinkRefused("the server does not know this key")
                case Disconnected():
                    return
                case Connected() | None:
                    pass
            silent_s = self._peer.tick()
            late = not self._greeted and time.monotonic() - since_s > GREETING_S
            if late or (self._greeted and silent_s > self._settings.silence_s):
                return

    async def _take(self, dealer: Dealer, buffers: Sequence[memoryview]) -> None:
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
                self._peer.meet(record.report, self._number, dealer.send)
            except LinkBreach as breach:
                raise LinkRefused(f"the server: {breach}") from None
            self._greeted = True


def limits_of(settings: LinkConfig) -> SocketLimits:
    """Return how much a peer can make this process hold for it."""
    # our heartbeats notice a break; ZeroMQ's only clear up connections that nobody speaks on
    return SocketLimits(
        settings.chunk_bytes + MAX_FRAME_EXTRA,
        waiting_in=FRAMES_WAITING,
        waiting_out=LEAVING_WAITING,
        silence_ms=round(settings.silence_s * 1000),
    )
