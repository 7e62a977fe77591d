"""Puts the bytes of one lane together to messages, each once, in order.

Invariant: `arrived` is the place of the first byte that is lacking, `settled` that of the first
message; a message is handed over when its digest agrees, and `settled` moves past it at once.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from megatron_opd.wire.link.sending import COUNT, DIGEST_BYTES, MAX_PARTS, LinkBreach

MAX_DAMAGED = 3
"""Times that one message may come with a wrong digest: then its sender is at fault, or memory."""


class ChunkVerdict(Enum):
    """Says what became of a chunk."""

    TAKEN = "taken"
    REPEATED = "repeated"
    AHEAD = "ahead"
    """Bytes before it are lacking."""
    DAMAGED = "damaged"
    """It ended a message whose digest is wrong; the message is asked for again."""


@dataclass(slots=True)
class _Message:
    """Holds a message while it comes: head and digest in `small`, its parts in one buffer.

    wanted: size of `small` at which there is something to do. sizes: None until the head is whole.
    """

    small: bytearray = field(default_factory=bytearray)
    wanted: int = COUNT.size
    sizes: list[int] | None = None
    body: memoryview = field(default_factory=lambda: memoryview(bytearray()))
    filled: int = 0
    found: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))


@dataclass(frozen=True, slots=True)
class WholeMessage:
    """Holds a message that is complete.

    num_bytes: its share of the stream, so that empty messages count too.
    """

    parts: tuple[memoryview, ...]
    num_bytes: int


class ReceiveLane:
    """Takes chunks. message_bytes: the largest message."""

    def __init__(self, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self.arrived = self.settled = 0
        self._damaged = 0
        self._message = _Message()
        self._asked = -1

    def ask(self) -> bool:
        """Return whether to ask for the bytes from `arrived` on: once, while nothing new comes."""
        if self._asked == self.arrived:
            return False
        self._asked = self.arrived
        return True

    def take(self, start: int, data: memoryview) -> tuple[ChunkVerdict, list[WholeMessage]]:
        """Take a chunk; return what became of it, and the messages that it completes.

        Breach: a message is larger than is allowed, or damaged again and again.
        """
        if start > self.arrived:
            return ChunkVerdict.AHEAD, []
        rest = data[self.arrived - start :]
        if not rest:
            return ChunkVerdict.REPEATED, []
        whole: list[WholeMessage] = []
        while rest:
            size = self._fill(rest)
            self.arrived += size
            rest = rest[size:]
            if self._message.filled == len(self._message.body) and self._is_at_end():
                done = self._finish()
                if done is None:
                    return ChunkVerdict.DAMAGED, whole
                whole.append(done)
        return ChunkVerdict.TAKEN, whole

    def _fill(self, rest: memoryview) -> int:
        """Put bytes where they belong; return how many."""
        message = self._message
        if message.sizes is not None and message.filled < len(message.body):
            size = min(len(rest), len(message.body) - message.filled)
            message.body[message.filled : message.filled + size] = rest[:size]
            message.found.update(rest[:size])
            message.filled += size
            return size
        size = min(len(rest), message.wanted - len(message.small))
        message.small += rest[:size]
        if message.sizes is None and len(message.small) == message.wanted:
            self._read_head(message)
        return size

    def _read_head(self, message: _Message) -> None:
        (count,) = COUNT.unpack_from(message.small)
        if count > MAX_PARTS:
            raise LinkBreach(f"a message of {count} parts, above {MAX_PARTS}")
        if message.wanted == COUNT.size:
            message.wanted += 8 * count
            if count:
                return
        message.sizes = list(struct.unpack_from(f"<{count}Q", message.small, COUNT.size))
        total = sum(message.sizes)
        if total > self._message_bytes:
            raise LinkBreach(f"a message of {total} bytes, above {self._message_bytes}")
        # without zeros, so that memory is taken as bytes come, not as a head claims
        message.body = np.empty(total, np.uint8).data
        message.found.update(message.small)
        message.wanted += DIGEST_BYTES

    def _is_at_end(self) -> bool:
        message = self._message
        return message.sizes is not None and len(message.small) == message.wanted

    def _finish(self) -> WholeMessage | None:
        """Return the message, None if it is damaged: then it is wanted again from its start."""
        message, self._message = self._message, _Message()
        assert message.sizes is not None
        if message.found.digest() != message.small[-DIGEST_BYTES:]:
            self._damaged += 1
            if self._damaged == MAX_DAMAGED:
                raise LinkBreach("a message whose digest is wrong again and again")
            self.arrived, self._asked = self.settled, -1
            return None
        self._damaged = 0
        self.settled = self.arrived
        body, at, parts = message.body.toreadonly(), 0, list[memoryview]()
        for size in message.sizes:
            parts.append(body[at : at + size])
            at += size
        return WholeMessage(tuple(parts), at + len(message.small))
