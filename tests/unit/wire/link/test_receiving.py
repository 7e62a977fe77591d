"""Messages are put together from pieces of any size; what cannot be is refused."""

import hashlib
import random
import struct
from itertools import pairwise

import pytest

from megatron_opd.wire.link.receiving import MAX_DAMAGED, ChunkVerdict, ReceiveLane
from megatron_opd.wire.link.sending import MAX_PARTS, LinkBreach, SendLane, flat

LIMIT = 10_000


def stream(*messages: list[bytes]) -> bytes:
    """The bytes of messages, made without the code under test."""
    found = b""
    for parts in messages:
        text = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)
        found += text + hashlib.blake2b(text, digest_size=32).digest()
    return found


MESSAGES = [[b""], [b"one", b"", b"two"], [], [bytes(1000)], [b"x" * 9, b"y"]]


@pytest.mark.parametrize("seed", range(30))
def test_pieces_of_any_size_make_the_messages(seed: int):
    chance, text = random.Random(seed), stream(*MESSAGES)
    cuts = sorted({0, len(text), *(chance.randrange(len(text)) for _ in range(seed))})
    lane, got = ReceiveLane(LIMIT), []
    for start, stop in pairwise(cuts):
        back = chance.randint(0, start)  # a piece may begin with what is there
        verdict, whole = lane.take(back, memoryview(text)[back:stop])
        assert verdict is ChunkVerdict.TAKEN
        got += [[bytes(part) for part in message.parts] for message in whole]
    assert got == MESSAGES
    assert lane.arrived == lane.settled == len(text)


def test_parts_cannot_be_written_to():
    (whole,) = ReceiveLane(LIMIT).take(0, memoryview(stream([b"abc"])))[1]
    assert whole.parts[0].readonly


@pytest.mark.parametrize("size", [1, 7, 100, 5000])
def test_a_sender_makes_the_stream_that_is_read(size: int):
    lane = SendLane()
    for parts in MESSAGES:
        lane.queue([memoryview(part) for part in parts])
    text = b""
    while (drawn := lane.draw(size)) is not None:
        start, pieces = drawn
        assert start == len(text)
        text += b"".join(bytes(v) for message, a, b in pieces for v in message.views(a, b))
    assert text == stream(*MESSAGES)


def test_a_big_part_is_not_copied():
    part, lane = bytes(5000), SendLane()
    lane.queue([memoryview(part)])
    lane.draw(100)
    drawn = lane.draw(1000)
    assert drawn is not None
    (view,) = [view for message, a, b in drawn[1] for view in message.views(a, b)]
    assert view.obj is part


def test_a_message_with_a_wrong_digest_is_wanted_again_from_its_start():
    first, second = stream([b"good"]), stream([b"hurt"])
    lane = ReceiveLane(LIMIT)
    hurt = second.replace(b"hurt", b"HURT")
    verdict, whole = lane.take(0, memoryview(first + hurt))
    assert verdict is ChunkVerdict.DAMAGED
    assert [bytes(message.parts[0]) for message in whole] == [b"good"]
    assert lane.arrived == lane.settled == len(first)
    assert lane.ask()
    verdict, whole = lane.take(len(first), memoryview(second))
    assert [bytes(message.parts[0]) for message in whole] == [b"hurt"]


def test_a_message_that_is_always_damaged_is_a_breach():
    lane, hurt = ReceiveLane(LIMIT), memoryview(stream([b"hurt"]).replace(b"hurt", b"HURT"))
    for _ in range(MAX_DAMAGED - 1):
        assert lane.take(0, hurt)[0] is ChunkVerdict.DAMAGED
    with pytest.raises(LinkBreach, match="again and again"):
        lane.take(0, hurt)


def test_a_sender_gives_a_damaged_message_again_although_it_was_acknowledged():
    lane = SendLane()
    lane.queue([memoryview(b"12345")])
    while lane.draw(10):
        pass
    lane.told(lane.queued, 0, again=False)
    assert lane.waiting_bytes == 0
    lane.told(0, 0, again=True)
    drawn = lane.draw(1000)
    assert drawn is not None
    assert drawn[0] == 0
    text = b"".join(bytes(v) for message, a, b in drawn[1] for v in message.views(a, b))
    assert text == stream([b"12345"])


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<IQ", 1, LIMIT + 1),
        struct.pack("<IQQ", 2, LIMIT, 1),
        struct.pack("<IQQ", 2, 2**64 - 1, 2),
        struct.pack("<I", MAX_PARTS + 1),
        struct.pack("<I", 2**32 - 1),
    ],
    ids=["one part", "two parts", "an overflow", "parts", "most parts"],
)
def test_a_message_above_the_limit_is_a_breach_as_soon_as_its_head_is_read(head: bytes):
    with pytest.raises(LinkBreach, match="above"):
        ReceiveLane(LIMIT).take(0, memoryview(head))


def test_a_claim_of_much_takes_no_memory_before_bytes_come():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lanes = [ReceiveLane(1 << 32) for _ in range(4)]
    for lane in lanes:
        lane.take(0, memoryview(struct.pack("<IQ", 1, 1 << 30)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000  # KiB


def test_the_same_gap_is_asked_for_once():
    lane, text = ReceiveLane(LIMIT), memoryview(stream([bytes(100)]))
    assert lane.take(50, text[50:])[0] is ChunkVerdict.AHEAD
    assert lane.ask()
    assert not lane.ask()
    lane.take(0, text[:20])
    assert lane.ask()


def test_a_part_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        flat(memoryview(bytes(10))[::2])
