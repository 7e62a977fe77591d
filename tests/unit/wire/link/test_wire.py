"""Frames of chunks and notes: what was damaged, forged or made too large is refused."""

import random

import msgspec
import pytest
import zstandard
from xxhash import xxh3_64, xxh3_64_intdigest

from megatron_opd.wire.link.wire import (
    BULK,
    HEAD,
    SUM,
    Ack,
    BadFrame,
    LinkHello,
    LinkReport,
    LinkWelcome,
    Packer,
    Ping,
    Pong,
    RefusalNote,
    State,
    Unpacker,
    note,
    read_note,
)

SEED = 77
STATE = State((1, 2), (0, 2), 3, 4)
REPORT = LinkReport(1, bytes(16), b"", STATE, 10, 20)
NOTES = [
    LinkHello(REPORT, 1),
    LinkWelcome(REPORT, 1),
    RefusalNote("no"),
    Ack(STATE),
    Ping(5),
    Pong(5, 1.0, 2.0, STATE),
]


def chunk(payload: bytes, size: int, *, packed: int = 0, lane: int = 0) -> list[bytes]:
    """A chunk with the right checksum, whatever it says."""
    head = HEAD.pack(lane, packed, size, 0)
    checksum = xxh3_64(head, seed=SEED)
    checksum.update(payload)
    return [head + SUM.pack(checksum.intdigest()), payload]


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize(
    "data", [b"a", bytes(300), bytes(500_000), random.Random(0).randbytes(500_000)], ids=len
)
def test_chunks_are_read_as_they_were_made(level: int, data: bytes):
    views = (
        [memoryview(data)[:100], memoryview(data)[100:]] if len(data) > 100 else [memoryview(data)]
    )
    frames = Packer(level).frames(BULK, 9, views, SEED)
    read = Unpacker(1 << 20).chunk(frames, SEED)
    assert (read.lane, read.start, bytes(read.data)) == (BULK, 9, data)


def test_what_shrinks_is_compressed_and_what_does_not_is_left():
    zeros, noise = bytes(500_000), random.Random(0).randbytes(500_000)
    for level, data, expected in ((3, zeros, 1), (3, noise, 0), (0, zeros, 0)):
        head, payload = Packer(level).frames(0, 0, [memoryview(data)], SEED)
        assert HEAD.unpack_from(head)[1] == expected
        assert (len(payload) < len(data) / 2) == bool(expected)


def test_a_look_at_the_middle_saves_the_work_on_what_does_not_shrink():
    data = bytes(100_000) + random.Random(0).randbytes(100_000) + bytes(100_000)
    head, _ = Packer(3).frames(0, 0, [memoryview(data)], SEED)
    assert HEAD.unpack_from(head)[1] == 0


def test_noise_is_sent_without_a_copy():
    noise = random.Random(0).randbytes(500_000)
    payload = Packer(3).frames(0, 0, [memoryview(noise)], SEED)[1]
    assert isinstance(payload, memoryview)
    assert payload.obj is noise


@pytest.mark.parametrize("data", [b"some bytes", bytes(1000)], ids=["plain", "compressed"])
def test_every_flipped_bit_of_a_chunk_is_found(data: bytes):
    frames = [bytes(frame) for frame in Packer(3).frames(0, 0, [memoryview(data)], SEED)]
    for index, frame in enumerate(frames):
        for bit in range(8 * len(frame)):
            bad = bytearray(frame)
            bad[bit // 8] ^= 1 << bit % 8
            hurt = [bytes(bad) if i == index else other for i, other in enumerate(frames)]
            with pytest.raises(BadFrame):
                Unpacker(1 << 20).chunk(hurt, SEED)


BOMB = zstandard.ZstdCompressor().compress(bytes(100 << 20))
STREAMED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
SMALL = zstandard.ZstdCompressor().compress(bytes(1000))
FORGED = {
    "a bomb that says its size": (chunk(BOMB, 1000, packed=1), "sizes contradict"),
    "a bomb in the head too": (chunk(BOMB, 100 << 20, packed=1), "above the limit"),
    "a bomb without a size": (chunk(STREAMED, 1000, packed=1), "sizes contradict"),
    "another size than it has": (chunk(b"12345", 6), "cannot be"),
    "bytes after the compressed": (chunk(SMALL + b"x", 1000, packed=1), "decompressed"),
    "two compressed": (chunk(SMALL + SMALL, 1000, packed=1), "decompressed"),
    "compressed bytes cut off": (chunk(SMALL[:-3], 1000, packed=1), "decompressed"),
    "noise as compressed": (chunk(b"\x01" * 20, 20, packed=1), "decompressed"),
    "no bytes": (chunk(b"", 0), "cannot be"),
    "a third lane": (chunk(b"12345", 5, lane=2), "cannot be"),
    "an unknown kind": (chunk(b"12345", 5, packed=2), "cannot be"),
    "more bytes than the limit": (chunk(bytes(70_000), 70_000), "above the limit"),
    "more bytes than it says": (chunk(bytes(70_000), 5), "above the limit"),
    "a short head": ([b"1234", b"5"], "head"),
    "a long head": ([bytes(HEAD.size + SUM.size + 1), b"5"], "head"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_keyed_peer_cannot_forge_a_chunk(what: str):
    frames, words = FORGED[what]
    with pytest.raises(BadFrame, match=words):
        Unpacker(65_536).chunk(frames, SEED)


@pytest.mark.parametrize("record", NOTES, ids=lambda record: type(record).__name__)
def test_notes_are_read_as_they_were_made(record: object):
    assert read_note(note(record, SEED), SEED) == record  # type: ignore[arg-type]


@pytest.mark.parametrize("record", NOTES, ids=lambda record: type(record).__name__)
def test_every_flipped_bit_of_a_note_is_found(record: object):
    frame = note(record, SEED)  # type: ignore[arg-type]
    for bit in range(8 * len(frame)):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadFrame):
            read_note(bytes(bad), SEED)


def test_only_a_greeting_is_heard_on_another_connection():
    assert read_note(note(NOTES[0], SEED), SEED + 1) == NOTES[0]  # type: ignore[arg-type]
    with pytest.raises(BadFrame, match="checksum"):
        read_note(note(NOTES[3], SEED), SEED + 1)  # type: ignore[arg-type]


def sealed(text: bytes) -> bytes:
    """A note with the right checksum, whatever it is."""
    return SUM.pack(xxh3_64_intdigest(text, 0 if text[:1] == b"G" else SEED)) + text


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        bytes(8),
        sealed(b"G"),
        sealed(b"T\xc1"),
        sealed(b"T" + msgspec.msgpack.encode(["Ping", -1])),
        sealed(b"T" + msgspec.msgpack.encode(["Ping", 2**63])),
        sealed(b"T" + msgspec.msgpack.encode(["Ping", 1, 2])),
        sealed(b"T" + msgspec.msgpack.encode(["Nothing"])),
        sealed(b"T" + msgspec.msgpack.encode(["LinkHello", 1, 2])),
        sealed(b"T" + b"\x91" * 100_000),
        sealed(b"G" + msgspec.msgpack.encode(["RefusalNote", "x" * 501])),
    ],
)
def test_what_is_no_note_is_refused(frame: bytes):
    with pytest.raises(BadFrame):
        read_note(frame, SEED)
