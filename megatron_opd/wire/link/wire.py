"""Defines what travels over a connection: chunks of a lane's bytes, and notes of the two ends.

A chunk has two frames, a head of fixed size and its bytes; a note has one: its checksum, a letter,
and a record. Every checksum is seeded: what was not made for this connection, in this direction,
does not pass. CURVE authenticates what comes; checksums are for faults of ours and of proxies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash
import zstandard

from megatron_opd.wire.codec import ENCODER, BadMessage, Codec

PROTOCOL = 1
"""Both ends must have the same."""
URGENT, BULK = 0, 1
LANES = (URGENT, BULK)
PROCESS_BYTES = 16
MIN_CHUNK = 16 << 10
MAX_CHUNK = 1 << 30
"""Largest chunk that a head can tell."""
HEAD = struct.Struct("<BBxxIQ")
"""Lane, whether the bytes are compressed, number of bytes once they are not, first byte's place."""
SUM = struct.Struct("<Q")
MAX_FRAME_EXTRA = 4096
"""What a frame may have above a chunk's bytes: CURVE's part; a note is smaller."""
WORTH = 0.95
"""Compressed bytes over plain ones, above which compression is not worth its time."""
PROBE_BYTES = 64 << 10
LEAST_COMPRESSED = 256
Buffer = bytes | bytearray | memoryview

Place = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Places = tuple[Place, Place]
Process = Annotated[bytes, msgspec.Meta(max_length=PROCESS_BYTES)]


class BadFrame(Exception):
    """Reports in a few words why frames were refused: a checksum, a size, a form."""


class _Note(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Serves as the base of all notes."""


class State(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Says what an end has received, lane by lane.

    arrived: place of the first byte that it lacks. settled: of the first message that it lacks.
    again: lanes, as bits, whose bytes are to be sent again from `arrived` on. room: bytes that it
    takes on top of what its owner has not taken yet.
    """

    arrived: Places
    settled: Places
    again: Annotated[int, msgspec.Meta(ge=0, lt=4)]
    room: Place


class LinkReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Describes a process. knows: the other process it last met, b"" for none.

    state: what it has received from that one. chunk_bytes, message_bytes: the largest that it
    takes.
    """

    protocol: int
    process: Process
    knows: Process
    state: State
    chunk_bytes: Place
    message_bytes: Place


class LinkHello(_Note, frozen=True):
    """Opens a connection. number: of this process's connections, growing."""

    report: LinkReport
    number: Place


class LinkWelcome(_Note, frozen=True):
    """Answers the Hello of the same number; only now chunks may come."""

    report: LinkReport
    number: Place


class RefusalNote(_Note, frozen=True):
    """Ends the link for this process, for a reason in one line."""

    cause: Annotated[str, msgspec.Meta(max_length=500)]


class Ack(_Note, frozen=True):
    """Tells what has arrived."""

    state: State


class Ping(_Note, frozen=True):
    """Asks for a sign of life."""

    number: Place


class Pong(_Note, frozen=True):
    """Answers a Ping. received_s, sent_s: Unix times of this end; state: as of now."""

    number: Place
    received_s: float
    sent_s: float
    state: State


Greeting = LinkHello | LinkWelcome | RefusalNote
Talk = Ack | Ping | Pong
_GREETING, _TALK = Codec[Greeting](Greeting), Codec[Talk](Talk)


def seed_of(source: bytes, target: bytes, number: int) -> int:
    """Return the seed of checksums from one process to another on one connection."""
    return xxhash.xxh3_64_intdigest(source + target + SUM.pack(number))


def note(record: Greeting | Talk, seed: int) -> bytes:
    """Return the frame of a note. seed: of the connection; a greeting comes before there is one."""
    greets = isinstance(record, (LinkHello, LinkWelcome, RefusalNote))
    text = (b"G" if greets else b"T") + ENCODER.encode(record)
    return SUM.pack(xxhash.xxh3_64_intdigest(text, 0 if greets else seed)) + text


def read_note(frame: Buffer, seed: int) -> Greeting | Talk:
    """Read a note. BadFrame: it is none, or not of this connection."""
    view = memoryview(frame)
    if len(view) <= SUM.size:
        raise BadFrame("a note that is cut off")
    greets = view[SUM.size] == ord("G")
    text = view[SUM.size :]
    if SUM.unpack(view[: SUM.size])[0] != xxhash.xxh3_64_intdigest(text, 0 if greets else seed):
        raise BadFrame("a note whose checksum is wrong")
    try:
        return (_GREETING if greets else _TALK).decode(text[1:])
    except BadMessage:
        raise BadFrame("a note that cannot be read") from None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Holds bytes of a lane's stream from the place `start` on."""

    lane: int
    start: int
    data: memoryview


class Packer:
    """Makes the frames of chunks. level: of zstd's compression; 0: none."""

    def __init__(self, level: int) -> None:
        self._zstd = zstandard.ZstdCompressor(level=level) if level else None

    def frames(self, lane: int, start: int, views: Sequence[memoryview], seed: int) -> list[Buffer]:
        """Return the frames of the chunk that `views` make up."""
        data: Buffer = views[0] if len(views) == 1 else b"".join(views)
        packed = self._packed(data)
        head = HEAD.pack(lane, packed is not None, len(data), start)
        payload = data if packed is None else packed
        checksum = xxhash.xxh3_64(head, seed=seed)
        checksum.update(payload)
        return [head + SUM.pack(checksum.intdigest()), payload]

    def _packed(self, data: Buffer) -> bytes | None:
        """Return the compressed bytes, None where that is not worth its time."""
        size = len(data)
        if self._zstd is None or size < LEAST_COMPRESSED:
            return None
        if size > 2 * PROBE_BYTES:
            middle = (size - PROBE_BYTES) // 2
            probe = memoryview(data)[middle : middle + PROBE_BYTES]
            if len(self._zstd.compress(probe)) > WORTH * PROBE_BYTES:
                return None
        packed = self._zstd.compress(data)
        return packed if len(packed) <= WORTH * size else None


class Unpacker:
    """Reads the frames of chunks, none of which makes more than `chunk_bytes`."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._zstd = zstandard.ZstdDecompressor()

    def chunk(self, frames: Sequence[Buffer], seed: int) -> Chunk:
        """Return the chunk of two frames. BadFrame: they are none, or not of this connection."""
        head, payload = frames
        if len(head) != HEAD.size + SUM.size:
            raise BadFrame("a chunk whose head has another size")
        lane, packed, size, start = HEAD.unpack_from(head)
        if size > self._chunk_bytes or len(payload) > self._chunk_bytes:
            raise BadFrame("a chunk above the limit")
        checksum = xxhash.xxh3_64(memoryview(head)[: HEAD.size], seed=seed)
        checksum.update(payload)
        if SUM.unpack_from(head, HEAD.size)[0] != checksum.intdigest():
            raise BadFrame("a chunk whose checksum is wrong")
        data = self._plain(payload, size) if packed == 1 else memoryview(payload)
        if lane not in LANES or packed > 1 or not size or len(data) != size:
            raise BadFrame("a chunk that cannot be")
        return Chunk(lane, start, data)

    def _plain(self, payload: Buffer, size: int) -> memoryview:
        """Return `payload` decompressed: at once no more than `size`, or it is refused unread."""
        try:
            if zstandard.frame_content_size(payload) != size:
                raise BadFrame("a chunk whose sizes contradict")
            return memoryview(self._zstd.decompress(payload, allow_extra_data=False))
        except zstandard.ZstdError:
            raise BadFrame("a chunk that cannot be decompressed") from None
