"""Runs one channel: sends what there is, at the allowed rate, and hands over what comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from typing import TypeVar

from megatron_opd.config.sites import LinkConfig
from megatron_opd.wire.link.channel import Channel, Draft, LinkLimits
from megatron_opd.wire.link.clock import ClockEstimate
from megatron_opd.wire.link.counts import LinkCounts
from megatron_opd.wire.link.events import Broken, Mended, Received, Restarted
from megatron_opd.wire.link.inbox import LinkInbox
from megatron_opd.wire.link.pace import MAX_FLIGHT_BYTES, TokenBucket
from megatron_opd.wire.link.receiving import WholeMessage
from megatron_opd.wire.link.sending import flat
from megatron_opd.wire.link.wire import (
    MAX_CHUNK,
    Ack,
    BadFrame,
    Buffer,
    Greeting,
    LinkReport,
    Ping,
    Pong,
    RefusalNote,
    Talk,
    note,
    read_note,
)

IN_THREAD_BYTES = 64 << 10
"""Chunks from this size on are made and read in a thread, so that the event loop goes on."""
FRAME_WIRE_BYTES = 9 + 33
"""What ZMTP and CURVE add to a frame."""
ResultT = TypeVar("ResultT")
Transmit = Callable[[Sequence[Buffer]], object]


class Peer:
    """Serves one end of a link; its tasks are its owner's (`pump`), who also calls `tick`.

    transmit: sends frames over the connection that is open, or loses them.
    """

    def __init__(
        self,
        name: str,
        process: bytes,
        settings: LinkConfig,
        message_bytes: int,
        inbox: LinkInbox,
        pool: Executor,
    ) -> None:
        limits = LinkLimits(
            min(settings.chunk_bytes, MAX_CHUNK), message_bytes, settings.outbox_bytes
        )
        self.name = name
        self.channel = Channel(process, limits, settings.compression)
        self.transmit: Transmit | None = None
        self._settings, self._inbox, self._pool = settings, inbox, pool
        self._bucket = TokenBucket(settings.bytes_per_s, time.monotonic())
        self._clock = ClockEstimate()
        self._wake, self._room = asyncio.Event(), asyncio.Event()
        self._heard_s = self._pinged_s = time.monotonic()
        self._pinged_at = 0.0
        self._fresh = self._probe = self._taking = False
        self._making: Draft | None = None
        self.ack_due = False
        self._broken = self._met = False
        self._restarts = 0
        self._restarts_taken = 0

    # -- the owner's side

    async def send(self, parts: Sequence[Buffer], lane: int) -> None:
        """Send a message; waits while too much waits. ValueError: it is larger than allowed."""
        views = [flat(part) for part in parts]
        size = sum(len(view) for view in views)
        if size > self.channel.message_bytes:
            limit = self.channel.message_bytes
            raise ValueError(f"a message of {size} bytes to {self.name}, above {limit}")
        restarts = self._restarts_taken
        while self.channel.outward[lane].waiting_bytes > self._settings.outbox_bytes:
            if self._inbox.failure is not None:
                raise self._inbox.failure
            self._room.clear()
            await self._room.wait()
        if self._inbox.failure is not None:
            raise self._inbox.failure
        if restarts != self._restarts or self._restarts_taken != self._restarts:
            self.channel.tally.messages_dropped += 1
            return
        self.channel.queue(lane, views)
        self._wake.set()

    def wake(self) -> None:
        """Let whoever waits look again."""
        self._wake.set()
        self._room.set()

    def counts(self) -> LinkCounts:
        """Return how this link does."""
        channel = self.channel
        return LinkCounts(
            connected=bool(channel.connection),
            rtt_s=self._clock.rtt_s,
            clock_offset_s=self._clock.offset_s,
            bytes_per_s=channel.pace.rate,
            waiting_bytes=channel.waiting_bytes,
            **asdict(channel.tally),
        )

    # -- the connection's side

    def meet(self, report: LinkReport, number: int, transmit: Transmit) -> None:
        """Begin a connection. Breach: with this one nobody speaks."""
        known = self.channel.peer
        new = self.channel.meet(report, number)
        self.transmit = transmit
        if new:
            if known:
                self._restarts += 1
            restart = self._restarts
            self._inbox.put(Restarted(self.name), lambda: self._took_restart(restart))
        self._heard()
        self._met = self._fresh = True
        self.wake()

    def leave(self) -> None:
        """End the connection."""
        self.channel.leave()
        self.transmit = None

    async def hear(self, frames: Sequence[Buffer]) -> RefusalNote | None:
        """Process frames of the connection that is open; return with what the other end ends it.

        Breach: nothing more is to be heard of the other process.
        """
        self._heard()
        if len(frames) == 2:
            await self._hear_chunk(frames)
        else:
            record = self.read(frames)
            if isinstance(record, RefusalNote):
                return record
            if isinstance(record, (Ack, Ping, Pong)):
                self._hear_note(record)
        self.flush()
        return None

    def read(self, frames: Sequence[Buffer]) -> Greeting | Talk | None:
        """Return the note in `frames`; None: it is none, which is counted."""
        try:
            if len(frames) != 1:
                raise BadFrame("a message of another number of frames")
            return read_note(frames[0], self.channel.seed_in)
        except BadFrame as error:
            self.channel.tally.refuse(str(error))
            return None

    def flush(self) -> None:
        """Tell the other end what has arrived, if that is news."""
        if self.ack_due and not self._taking:
            self.ack_due = False
            self._say(Ack(self.channel.state))

    def tick(self) -> float:
        """Send a heartbeat if one is due, notice silence; returns the seconds of silence."""
        now_s = time.monotonic()
        silent_s = now_s - self._heard_s
        if self._met and silent_s > self._settings.silence_s and not self._broken:
            self._broken = True
            self._inbox.put(Broken(self.name), _nothing)
        if self.channel.connection and now_s - self._pinged_s >= self._settings.heartbeat_s:
            self._ping()
        return silent_s

    async def pump(self) -> None:
        """Send chunks until cancelled."""
        while True:
            self._wake.clear()
            if self._fresh:  # before any chunk: this tells the round trip of the idle link
                self._fresh = False
                self._ping()
            wait_s = self._bucket.wait_s(time.monotonic())
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            draft = self.channel.draw(time.monotonic())
            if draft is None:
                if self._probe and self.channel.connection:
                    self._probe = False
                    self._ping()
                await self._wake.wait()
                continue
            size = sum(stop - start for _, start, stop in draft.pieces)
            self._making = draft
            frames = await self._in_thread(size, lambda draft=draft: self.channel.sealed(draft))
            self._making = None
            if draft.seed == self.channel.seed and self.channel.connection:
                self._transmit(frames)

    # -- inside

    async def _hear_chunk(self, frames: Sequence[Buffer]) -> None:
        limits, channel = self.channel.limits, self.channel
        if channel.inbox_bytes > limits.inbox_bytes + 2 * MAX_FLIGHT_BYTES + limits.message_bytes:
            channel.tally.refuse("a chunk for which there is no room")
            return
        self._taking = True
        try:
            lane, whole = await self._in_thread(len(frames[1]), lambda: channel.take(frames))
        finally:
            self._taking = False
        self.ack_due = True
        for message in whole:
            self._deliver(lane, message)

    def _deliver(self, lane: int, message: WholeMessage) -> None:
        size = message.num_bytes
        self.channel.inbox_bytes += size
        self._inbox.put(Received(self.name, lane, message.parts), lambda: self._took(size))

    def _took(self, size: int) -> None:
        """Note that the owner has a message; say so where there was no room."""
        limit = self.channel.limits.inbox_bytes
        was_full = self.channel.inbox_bytes >= limit
        self.channel.inbox_bytes -= size
        if was_full and self.channel.inbox_bytes < limit:
            self.ack_due = True
            self.flush()

    def _took_restart(self, number: int) -> None:
        self._restarts_taken = number

    def _hear_note(self, record: Talk) -> None:
        now_s = time.monotonic()
        if isinstance(record, Ping):
            received_s = time.time()
            self._say(Pong(record.number, received_s, time.time(), self.channel.state))
            return
        again = self.channel.tally.bytes_again
        if isinstance(record, Ack):
            self.channel.told(record.state, now_s)
        elif self.channel.ponged(record, now_s):
            self._clock.add(self._pinged_at, record.received_s, record.sent_s, time.time())
        if self.channel.tally.bytes_again > again:
            self._probe = True
        self.wake()

    def _ping(self) -> None:
        self._pinged_s, self._pinged_at = time.monotonic(), time.time()
        self._say(Ping(self.channel.ping(self._pinged_s, self._making)))

    def _say(self, record: Talk) -> None:
        if self.channel.connection:
            self._transmit([note(record, self.channel.seed)])

    def _transmit(self, frames: Sequence[Buffer]) -> None:
        if self.transmit is None:
            return
        size = sum(len(frame) + FRAME_WIRE_BYTES for frame in frames)
        self._bucket.spend(size)
        self.channel.tally.wire_bytes_sent += size
        self.transmit(frames)

    def _heard(self) -> None:
        self._heard_s = time.monotonic()
        if self._broken:
            self._broken = False
            self._inbox.put(Mended(self.name), _nothing)

    async def _in_thread(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        if size < IN_THREAD_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _nothing() -> None:
    """Serve where nobody needs to know that an event was taken."""
