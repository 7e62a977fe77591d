"""Two channels and what lies between them: frames that are lost, repeated, reordered, damaged."""

import random
import secrets
from collections import deque
from dataclasses import dataclass, field

from megatron_opd.wire.link.channel import Channel, LinkLimits
from megatron_opd.wire.link.wire import LANES, Ack, BadFrame, Ping, Pong, note, read_note

LIMITS = LinkLimits(chunk_bytes=64, message_bytes=4096, inbox_bytes=1 << 20)
Frames = list[bytes]


@dataclass
class Side:
    """One end. sent, got: by lane, since the two processes met."""

    channel: Channel
    sent: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))
    got: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))
    line: deque[Frames] = field(default_factory=deque[Frames])
    """What is on its way to this end."""


def new_side(limits: LinkLimits = LIMITS, compression: int = 3) -> Side:
    return Side(Channel(secrets.token_bytes(16), limits, compression))


class Network:
    """Moves frames between `client` and `server` as `chance` has it; time is counted in steps."""

    def __init__(self, chance: random.Random, limits: LinkLimits = LIMITS) -> None:
        self.chance, self.limits = chance, limits
        self.client, self.server = new_side(limits), new_side(limits)
        self.now_s = 0.0
        self.connection = 0
        self.recorded: list[tuple[Side, Frames]] = []
        self.resume = self.acknowledge = True

    def sides(self) -> tuple[Side, Side]:
        return self.client, self.server

    def other(self, side: Side) -> Side:
        return self.server if side is self.client else self.client

    def connect(self, *, welcome: bool = True) -> None:
        """Break what there is, and greet; the answer may be lost."""
        self.connection += 1
        for side in self.sides():
            side.line.clear()
        self.client.channel.leave()
        self._meet(self.server, self.client)
        if welcome:
            self._meet(self.client, self.server)

    def _meet(self, side: Side, other: Side) -> None:
        before = side.channel.peer
        if side.channel.meet(other.channel.report, self.connection) and before:
            for lane in LANES:
                side.sent[lane].clear()
                side.got[lane].clear()

    def restart(self, side: Side) -> None:
        """Replace a process by another, which knows nothing."""
        for lane in LANES:
            side.sent[lane].clear()
            side.got[lane].clear()
        side.channel = new_side(self.limits).channel
        self.connect()
        for lane in LANES:
            self.other(side).got[lane].clear()

    def queue(self, side: Side, lane: int, message: bytes) -> None:
        cut = self.chance.randint(0, len(message))
        side.channel.queue(lane, [memoryview(message)[:cut], memoryview(message)[cut:]])
        side.sent[lane].append(message)

    def send(self, side: Side) -> bool:
        """Send one chunk; returns whether there was one."""
        draft = side.channel.draw(self.now_s)
        if draft is None:
            return False
        self.put(side, [bytes(frame) for frame in side.channel.sealed(draft)])
        return True

    def say(self, side: Side, record: Ack | Ping | Pong) -> None:
        if side.channel.connection:
            self.put(side, [note(record, side.channel.seed)])

    def ping(self, side: Side) -> None:
        self.say(side, Ping(side.channel.ping(self.now_s)))

    def put(self, side: Side, frames: Frames) -> None:
        self.recorded.append((self.other(side), frames))
        self.other(side).line.append(frames)

    def deliver(self, side: Side, index: int = 0) -> None:
        """Give the frames at a place of the line to their end."""
        line = side.line
        line.rotate(-index)
        frames = line.popleft()
        line.rotate(index)
        self.hear(side, frames)

    def hear(self, side: Side, frames: Frames) -> None:
        channel = side.channel
        if not channel.connection:
            return
        if len(frames) == 2:
            lane, whole = channel.take(frames)
            side.got[lane].extend(b"".join(message.parts) for message in whole)
            if self.acknowledge:
                self.say(side, Ack(channel.state))
            return
        try:
            record = read_note(frames[0], channel.seed_in)
        except BadFrame as error:
            channel.tally.refuse(str(error))
            return
        if isinstance(record, Ping):
            self.say(side, Pong(record.number, 0.0, 0.0, channel.state))
        elif isinstance(record, Ack):
            channel.told(record.state, self.now_s)
        elif isinstance(record, Pong):
            channel.ponged(record, self.now_s)

    def settle(self, rounds: int = 2000) -> None:
        """Connect, and move everything faithfully until nothing is left to do."""
        self.connect()
        for _ in range(rounds):
            self.now_s += 0.01
            busy = False
            for side in self.sides():
                while self.send(side):
                    busy = True
            for side in self.sides():
                while side.line:
                    self.deliver(side)
                    busy = True
            waits = [side for side in self.sides() if side.channel.waiting_bytes]
            if not busy and not waits:
                return
            if not busy:
                for side in waits:
                    self.ping(side)
        raise AssertionError("the link does not settle")


def damaged(frames: Frames, chance: random.Random) -> Frames:
    """One bit flipped, a tail cut off, bytes added, or a frame lost or repeated."""
    frames = [bytes(frame) for frame in frames]
    index = chance.randrange(len(frames))
    frame = bytearray(frames[index])
    what = chance.randrange(5)
    if what == 0 and frame:
        frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
    elif what == 1 and frame:
        del frame[chance.randrange(len(frame)) :]
    elif what == 2:
        frame += chance.randbytes(chance.randint(1, 8))
    elif what == 3 and len(frames) == 2:
        frames.reverse()
        return frames
    else:
        frame = bytearray(chance.randbytes(len(frame)))
    frames[index] = bytes(frame)
    return frames
