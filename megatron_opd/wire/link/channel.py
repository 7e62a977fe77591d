"""Holds one end of a link without any input or output: lanes, greetings, acknowledgements.

Invariant: while both processes live, each message that one end queues is handed over once by the
other, in the order of its lane, whatever connections and frames are lost, repeated or damaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opd.wire.link.counts import LinkTally
from megatron_opd.wire.link.pace import Pace
from megatron_opd.wire.link.receiving import ChunkVerdict, ReceiveLane, WholeMessage
from megatron_opd.wire.link.sending import LinkBreach, Outgoing, SendLane
from megatron_opd.wire.link.wire import (
    BULK,
    LANES,
    PROTOCOL,
    URGENT,
    BadFrame,
    Buffer,
    LinkReport,
    Packer,
    Pong,
    State,
    Unpacker,
    seed_of,
)

URGENT_IN_A_ROW = 8
"""Urgent chunks after which one of the other lane is sent, so that it is never starved."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds what an end takes, in bytes. inbox: of messages that its owner has not taken yet."""

    chunk_bytes: int
    message_bytes: int
    inbox_bytes: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Holds what the next chunk is made of; `Channel.sealed` makes its frames, in any thread."""

    lane: int
    start: int
    pieces: Sequence[tuple[Outgoing, int, int]]
    seed: int


class Channel:
    """Serves one end of a link to one peer.

    process: names this process. peer: names the other one, b"" before the first greeting.
    """

    def __init__(self, process: bytes, limits: LinkLimits, compression: int) -> None:
        self.process, self.peer, self.limits = process, b"", limits
        self.tally = LinkTally()
        self.inbox_bytes = 0
        self.chunk_bytes, self.message_bytes = limits.chunk_bytes, limits.message_bytes
        self.connection = 0
        """Number of the connection; 0: none is open."""
        self._packer = Packer(compression)
        self._seed_out = self._seed_in = 0
        self._start_over()

    def _start_over(self) -> None:
        self.pace = Pace(self.limits.chunk_bytes)
        self.outward = tuple(SendLane() for _ in LANES)
        self._inward = tuple(ReceiveLane(self.limits.message_bytes) for _ in LANES)
        self._unpacker = Unpacker(self.limits.chunk_bytes)
        self._again = 0
        self._urgent_in_a_row = 0
        self._marks: tuple[int, tuple[int, ...]] = (0, (0, 0))
        self._pings, self._pinged_s = 0, 0.0
        self._news = 0
        self._rewinds, self._room = 0, 0

    # -- greetings

    @property
    def state(self) -> State:
        """Returns what has arrived here; what is to be sent again is asked for once."""
        urgent, bulk = self._inward
        again, self._again = self._again, 0
        room = max(0, self.limits.inbox_bytes - self.inbox_bytes)
        return State((urgent.arrived, bulk.arrived), (urgent.settled, bulk.settled), again, room)

    @property
    def report(self) -> LinkReport:
        """Returns what this end says of itself in a greeting."""
        limits = self.limits
        return LinkReport(
            PROTOCOL, self.process, self.peer, self.state, limits.chunk_bytes, limits.message_bytes
        )

    def meet(self, report: LinkReport, connection: int) -> bool:
        """Begin a connection with who sent `report`; return whether it is another process.

        What waits for a process that is gone is dropped. Breach: it cannot be spoken to.
        """
        if report.protocol != PROTOCOL:
            raise LinkBreach(f"it speaks protocol {report.protocol} of the link, not {PROTOCOL}")
        if not report.process or not report.chunk_bytes:
            raise LinkBreach("its greeting is malformed")
        new = report.process != self.peer
        if new and self.peer:
            self._start_over()
        self.peer, self.connection = report.process, connection
        self.chunk_bytes = min(self.limits.chunk_bytes, report.chunk_bytes)
        self.message_bytes = min(self.limits.message_bytes, report.message_bytes)
        self._seed_out = seed_of(self.process, self.peer, connection)
        self._seed_in = seed_of(self.peer, self.process, connection)
        if not new:
            self.pace.broke(progressed=self._news > 0 or not self.waiting_bytes)
        self._news = 0
        self._marks = (self._pings, (0, 0))
        known = report.knows == self.process
        for lane, outward in enumerate(self.outward):
            arrived = report.state.arrived[lane] if known else 0
            settled = report.state.settled[lane] if known else 0
            before = outward.sent
            outward.resume(arrived, settled)
            self.tally.bytes_again += max(0, before - outward.sent)
        self._room = report.state.room
        self.tally.connections += 1
        return new

    def leave(self) -> None:
        """Note that the connection is gone."""
        self.connection = 0

    # -- sending

    @property
    def seed(self) -> int:
        """Returns the seed of what this end sends on this connection."""
        return self._seed_out

    @property
    def seed_in(self) -> int:
        """Returns the seed of what comes on this connection."""
        return self._seed_in

    @property
    def waiting_bytes(self) -> int:
        """Returns how many bytes the other end has not told of, in both lanes."""
        return sum(lane.waiting_bytes for lane in self.outward)

    def queue(self, lane: int, parts: Sequence[memoryview]) -> None:
        """Append a message to a lane."""
        self.outward[lane].queue(parts)
        self.tally.messages_sent += 1
        self.tally.bytes_sent += sum(len(part) for part in parts)

    def draw(self, now_s: float) -> Draft | None:
        """Return what to send now, None while nothing may be sent."""
        if not self.connection:
            return None
        first = BULK if self._urgent_in_a_row >= URGENT_IN_A_ROW else URGENT
        for lane in (first, 1 - first):
            draft = self._draw_of(lane, now_s)
            if draft is not None:
                self._urgent_in_a_row = self._urgent_in_a_row + 1 if lane == URGENT else 0
                return draft
        return None

    def _draw_of(self, lane: int, now_s: float) -> Draft | None:
        outward, pace = self.outward[lane], self.pace
        if not pace.may_send(lane, outward.flying_bytes, self._room):
            return None
        size = min(pace.chunk_bytes, self.chunk_bytes)
        drawn = outward.draw(size)
        if drawn is None:
            return None
        start, pieces = drawn
        full = outward.sent < outward.queued or outward.sent - start == size
        pace.sent(lane, outward.sent, now_s, full=full)
        self.tally.chunks_sent += 1
        return Draft(lane, start, pieces, self._seed_out)

    def sealed(self, draft: Draft) -> list[Buffer]:
        """Return the frames of a draft; one draft after another."""
        views = [view for message, a, b in draft.pieces for view in message.views(a, b)]
        return self._packer.frames(draft.lane, draft.start, views, draft.seed)

    def told(self, state: State, now_s: float) -> None:
        """Process what the other end has. Breach: it says what cannot be."""
        self._room = state.room
        for lane, outward in enumerate(self.outward):
            again = bool(state.again >> lane & 1)
            self._note(lane, outward, state, now_s, again=again)

    def _note(
        self, lane: int, outward: SendLane, state: State, now_s: float, *, again: bool
    ) -> None:
        arrived, before = state.arrived[lane], outward.sent
        news = outward.told(arrived, state.settled[lane], again=again)
        self._news += news
        self.pace.told(lane, outward.arrived, news, now_s)
        if outward.sent < before:
            self.tally.bytes_again += before - outward.sent
            self.pace.forget(lane)
            self._rewinds += 1

    def ping(self, now_s: float, making: Draft | None = None) -> int:
        """Return the number of the next heartbeat; what was sent before it should arrive first.

        making: what was drawn, and follows the heartbeat.
        """
        self._pings += 1
        self._pinged_s = now_s
        marks = [lane.sent for lane in self.outward]
        if making is not None:
            marks[making.lane] = min(marks[making.lane], making.start)
        self._marks = (self._pings, tuple(marks))
        self._rewinds = 0
        return self._pings

    def ponged(self, pong: Pong, now_s: float) -> bool:
        """Process an answer; return whether it is to the last heartbeat.

        What was sent before that and has not arrived is lost, and sent again.
        """
        self.told(pong.state, now_s)
        number, marks = self._marks
        if pong.number != number:
            return False
        self.pace.rtt_s = min(self.pace.rtt_s, now_s - self._pinged_s)
        if not self._rewinds:
            for lane, outward in enumerate(self.outward):
                lost = pong.state.arrived[lane] < marks[lane] and outward.arrived < marks[lane]
                self._note(lane, outward, pong.state, now_s, again=lost)
        return True

    # -- receiving

    def take(self, frames: Sequence[Buffer]) -> tuple[int, list[WholeMessage]]:
        """Take the frames of a chunk; return its lane, and the messages that it completes.

        What is refused is counted, and asked for with the next `state`. Breach: see ReceiveLane.
        """
        self.tally.chunks_received += 1
        try:
            chunk = self._unpacker.chunk(frames, self._seed_in)
        except BadFrame as error:
            self.tally.refuse(str(error))
            for lane in LANES:  # its head cannot be trusted
                self._ask(lane)
            return URGENT, []
        verdict, whole = self._inward[chunk.lane].take(chunk.start, chunk.data)
        if verdict is not ChunkVerdict.TAKEN:
            self.tally.refuse(verdict.value)
        if verdict in (ChunkVerdict.AHEAD, ChunkVerdict.DAMAGED):
            self._ask(chunk.lane)
        for message in whole:
            self.tally.messages_received += 1
            self.tally.bytes_received += sum(len(part) for part in message.parts)
        return chunk.lane, whole

    def _ask(self, lane: int) -> None:
        if self._inward[lane].ask():
            self._again |= 1 << lane
