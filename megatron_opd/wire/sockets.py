"""Holds what Router and Dealer share: limits, waiting, and the order of what they tell.

Invariant: what a peer said last is heard before it is gone. ZeroMQ hands over messages by one
socket and the ends of connections by another, its monitor, and does not say which came first. So
events are read first, then every message that is there, and only then are these events told.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

EventT = TypeVar("EventT")
Buffer = bytes | bytearray | memoryview
HANDSHAKE_MS = 10_000
# A host that vanished is noticed after HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS. ZeroMQ's own threads
# send and answer heartbeats: a peer whose Python is busy is not taken for dead.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 6_000
# events handled before messages are read again: strangers that connect faster than they are counted
# would otherwise keep the owner waiting
EVENTS_A_TURN = 256
MORE, LAST = int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK)


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Bounds what a peer can make this process hold.

    frame_bytes: of the largest frame; a larger one ends its connection. waiting_in, waiting_out:
    most messages of one connection that wait for this process, or for TCP; 0: any number.
    silence_ms: between heartbeats, and without an answer, before a connection is ended; None:
    HEARTBEAT_MS and HEARTBEAT_TIMEOUT_MS.
    """

    frame_bytes: int
    waiting_in: int = 0
    waiting_out: int = 0
    silence_ms: int | None = None

    def set_on(self, socket: zmq.Socket[Any]) -> None:
        """Set them on a socket that is neither bound nor connected."""
        socket.set(zmq.MAXMSGSIZE, self.frame_bytes)
        socket.set(zmq.RCVHWM, self.waiting_in)
        socket.set(zmq.SNDHWM, self.waiting_out)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.set(zmq.HEARTBEAT_IVL, self.silence_ms or HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, self.silence_ms or HEARTBEAT_TIMEOUT_MS)


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """Holds a whole message. route: names the peer's connection to a Router; empty at a Dealer."""

    frames: list[zmq.Frame]
    route: bytes = b""

    @property
    def buffers(self) -> list[memoryview]:
        """Returns the bytes of every frame."""
        return [frame.buffer for frame in self.frames]


class WireSocket(ABC, Generic[EventT]):
    """Serves as the base of both. EventT: what it tells of its connections.

    Args:
        socket: neither bound nor connected.
        limits: are set on it.
        events: of ZeroMQ's monitor that are read.
        together_s: least time between two waits, so that what comes meanwhile is taken together.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        limits: SocketLimits,
        events: int,
        together_s: float = 0.0,
    ) -> None:
        limits.set_on(socket)
        self._socket, self._descriptor = socket, socket.fileno()
        # get_monitor_socket takes 2,000 events; then ZeroMQ's thread waits for this process to read
        # them, and sends no heartbeats meanwhile
        self._monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 0)
        address = f"inproc://monitor-{self._descriptor}"
        socket.monitor(address, events)
        self._monitor.connect(address)
        self._together_s, self._next_s = together_s, 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._unwatched: list[int] = []
        """Descriptors that the loop is to watch at the next wait."""
        self._look_due = True

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Returns what to poll before another `next_now`."""
        return [self._socket, self._monitor]

    @property
    def closed(self) -> bool:
        """Returns whether this end was closed."""
        return self._socket.closed

    async def next(self, within_s: float | None = None) -> PeerMessage | EventT | None:
        """Wait for a message, or for what became of a connection. None: nothing, `within_s`."""
        found = self._taken()
        if found is not None:
            return found
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while found is None:
                    await self._readable()
                    if self._look_due:
                        self._look_due = self._look()
                    found = self._taken()
        return found

    def next_now(self) -> PeerMessage | EventT | None:
        """Return a message, or what became of a connection; None: nothing is there."""
        if (found := self._taken()) is None:
            self._look()
            found = self._taken()
        return found

    def _taken(self) -> PeerMessage | EventT | None:
        """Return a message, or an event if no message was left after the last look."""
        frames = received(self._socket)
        return self._event() if frames is None else self._message(frames)

    @abstractmethod
    def _message(self, frames: list[zmq.Frame]) -> PeerMessage: ...

    @abstractmethod
    def _note(self, event: int, descriptor: int) -> None:
        """Keep an event of the monitor. descriptor: of its connection."""

    @abstractmethod
    def _event(self) -> EventT | None:
        """Return the oldest event that was kept and not told; None: there is none."""

    def _look(self) -> bool:
        """Read events; return whether there may be more."""
        for _ in range(EVENTS_A_TURN):
            message = received(self._monitor)
            if message is None:
                return False
            event = parse_monitor_message([frame.bytes for frame in message])
            self._note(event["event"], event["value"])
        return True

    async def _readable(self) -> None:
        """Return once there may be something, in another turn of the event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self._unwatched = loop, [each.fileno() for each in self.sockets]
        if self._look_due:
            await asyncio.sleep(0)
        else:
            # a descriptor is readable from the first news on until all of it was read, so each is
            # watched until then alone
            for descriptor in self._unwatched:
                loop.add_reader(descriptor, self._came, descriptor)
            self._unwatched.clear()
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        early_s = self._next_s - loop.time()
        if early_s > 0:
            await asyncio.sleep(early_s)
        self._next_s = loop.time() + self._together_s

    def _came(self, descriptor: int) -> None:
        assert self._loop is not None
        self._loop.remove_reader(descriptor)
        self._unwatched.append(descriptor)
        self._look_due = self._look_due or descriptor != self._descriptor
        self._wake()

    def _wake(self) -> None:
        """End a wait, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _send(self, frames: Sequence[Buffer]) -> None:
        *rest, last = frames
        for frame in rest:  # send_multipart makes these flags anew for every frame
            self._socket.send(frame, MORE, copy=False)
        self._socket.send(last, LAST, copy=False)
        # sending may have taken note of what came, of which the descriptor then says nothing
        if self._waiter is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._wake()

    def _close(self, linger_ms: int) -> None:
        self._wake()
        if self._loop is not None:
            for socket in self.sockets:
                self._loop.remove_reader(socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)


def wait_for_any(ends: Sequence[WireSocket[Any]], wait_s: float) -> None:
    """Return once `next_now` of one of these may have something, or after `wait_s`."""
    poller = zmq.Poller()
    for socket in (socket for end in ends for socket in end.sockets):
        poller.register(socket, zmq.POLLIN)
    poller.poll(max(0, int(wait_s * 1000)))


def received(socket: zmq.Socket[Any]) -> list[zmq.Frame] | None:
    """Return the frames of the next message; None: there is none.

    ZeroMQ drops what it had ready when a connection ends. So a receive that may wait, after a poll
    that found a message, can wait for ever.
    """
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
