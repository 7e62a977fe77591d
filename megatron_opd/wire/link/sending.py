"""Keeps what is sent over one lane until the other end has it.

A lane is an endless stream of bytes: message after message, each a head with the sizes of its
parts, the parts, and their digest. Invariant: every byte that the other end may still ask for lies
here, in the buffers that the sender gave; chunks are cut from them anew, at any place.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from megatron_opd.wire.link.wire import Buffer

COUNT = struct.Struct("<I")
DIGEST_BYTES = 32
MAX_PARTS = 1 << 16


class LinkBreach(Exception):
    """Reports in one line what an end must not do; nothing more of it is heard."""


def head_of(sizes: Sequence[int]) -> bytes:
    """Return the head of a message whose parts have these sizes in bytes."""
    return COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)


def flat(part: Buffer) -> memoryview:
    """Return the bytes of a part, without a copy. ValueError: they do not lie side by side."""
    view = memoryview(part)
    if not view.c_contiguous:
        raise ValueError("a part of a message must be contiguous")
    return view.cast("B") if view.ndim != 1 or view.format != "B" else view


class Outgoing:
    """Holds one message at its place in the stream; `views` cuts pieces from it."""

    def __init__(self, start: int, parts: Sequence[memoryview]) -> None:
        self.start = start
        self._head = head_of([len(part) for part in parts])
        self._parts = [memoryview(self._head), *(part for part in parts if len(part))]
        self._starts = list(accumulate((len(part) for part in self._parts), initial=0))
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._hashed = 0
        self._body = self._starts[-1]
        self.stop = start + self._body + DIGEST_BYTES

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes between two places of the stream; call for earlier places first."""
        first, last = start - self.start, stop - self.start
        at = first
        while at < min(last, self._body):
            index = bisect_right(self._starts, at) - 1
            begin = self._starts[index]
            view = self._parts[index][at - begin : last - begin]
            if at + len(view) > self._hashed:
                self._hash.update(view[max(0, self._hashed - at) :])
                self._hashed = at + len(view)
            yield view
            at += len(view)
        if last > self._body:
            yield memoryview(self._hash.digest())[max(0, first - self._body) : last - self._body]


class SendLane:
    """Hands out chunks in order, and again from where the other end asks.

    queued: place after the last message. sent: of the next byte to send. arrived: of the first byte
    that the other end has not told of.
    """

    def __init__(self) -> None:
        self._flown: deque[Outgoing] = deque()
        """Messages that were sent to their end, and may be asked for again."""
        self._ahead: deque[Outgoing] = deque()
        """Messages after these; the first may be sent in part."""
        self.queued = self.sent = self.arrived = self.settled = 0
        self.furthest = 0
        """Place after the last byte that was ever sent."""

    @property
    def waiting_bytes(self) -> int:
        """Returns the number of bytes that the other end has not told of."""
        return self.queued - self.arrived

    @property
    def flying_bytes(self) -> int:
        """Returns the number of bytes that are on their way."""
        return self.sent - self.arrived

    def queue(self, parts: Sequence[memoryview]) -> None:
        """Append a message."""
        message = Outgoing(self.queued, parts)
        self._ahead.append(message)
        self.queued = message.stop

    def draw(self, limit: int) -> tuple[int, list[tuple[Outgoing, int, int]]] | None:
        """Take the next bytes, at most `limit`: where they start, and pieces of messages.

        Returns None where all were sent.
        """
        if self.sent == self.queued:
            return None
        start, pieces = self.sent, list[tuple[Outgoing, int, int]]()
        end = min(start + limit, self.queued)
        while self.sent < end:
            message = self._ahead[0]
            stop = min(message.stop, end)
            pieces.append((message, self.sent, stop))
            self._move(stop)
        self.furthest = max(self.furthest, self.sent)
        return start, pieces

    def told(self, arrived: int, settled: int, *, again: bool) -> int:
        """Process what the other end says it has; returns how many bytes more these are.

        Breach: it has what was never sent. What it said before it said more is no news.
        """
        if not settled <= arrived <= self.furthest:
            raise LinkBreach("it acknowledged bytes that were never sent")
        self.settled = max(self.settled, settled)
        news = max(0, arrived - self.arrived)
        self.arrived += news
        if again and arrived >= self.settled:
            self.arrived = arrived
            self._move(arrived)
        else:
            self._move(max(self.sent, self.arrived))
        while self._flown and self._flown[0].stop <= settled:
            self._flown.popleft()
        return news

    def _move(self, place: int) -> None:
        """Continue at `place`; takes time for the messages between, not for all that wait."""
        self.sent = place
        while self._ahead and self._ahead[0].stop <= place:
            self._flown.append(self._ahead.popleft())
        while self._flown and self._flown[-1].stop > place:
            self._ahead.appendleft(self._flown.pop())

    def resume(self, arrived: int, settled: int) -> int:
        """Continue after a break from what the other end has; returns as `told` does."""
        if settled < self.settled or arrived < settled:
            raise LinkBreach("it has lost what it had acknowledged")
        news = self.told(arrived, settled, again=True)
        return news
