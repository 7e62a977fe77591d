"""Chunks grow to what takes a quarter of a second; a token bucket keeps its rate."""

import pytest

from megatron_opd.wire.link.pace import FIRST_CHUNK, FLIGHT_S, MAX_FLIGHTS, Pace, TokenBucket
from megatron_opd.wire.link.wire import BULK, MIN_CHUNK, URGENT

MOST = 4 << 20
ROOM = 1 << 40


def carried(bytes_per_s: float, chunks: int = 60) -> Pace:
    """What a lane learns from a link of this rate, one chunk after another."""
    pace, at, now_s = Pace(MOST), 0, 0.0
    for _ in range(chunks):
        size = pace.chunk_bytes
        at += size
        pace.sent(BULK, at, now_s, full=True)
        now_s += size / bytes_per_s
        pace.told(BULK, at, size, now_s)
    return pace


@pytest.mark.parametrize("rate", [100_000, 1_000_000, 10_000_000])
def test_a_chunk_takes_a_quarter_to_a_whole_second(rate: int):
    pace = carried(rate)
    assert pace.rate == pytest.approx(rate)
    assert 0.25 <= (pace.chunk_bytes + 1) / rate <= 1.0


@pytest.mark.parametrize(("rate", "size"), [(1000, MIN_CHUNK), (10**9, MOST)])
def test_chunks_stay_within_their_limits(rate: int, size: int):
    assert carried(rate).chunk_bytes == size


def test_small_limits_are_kept():
    pace = Pace(1000)
    assert pace.chunk_bytes == 1000
    pace.broke(progressed=False)
    assert pace.chunk_bytes == 1000


def test_chunks_shrink_while_nothing_gets_through_and_grow_again():
    pace = Pace(MOST)
    sizes = [pace.chunk_bytes]
    for _ in range(3):
        pace.broke(progressed=False)
        sizes.append(pace.chunk_bytes)
    assert sizes == [FIRST_CHUNK, MIN_CHUNK, MIN_CHUNK, MIN_CHUNK]
    before = carried(10**9)
    before.broke(progressed=True)
    assert before.chunk_bytes == MOST
    before.broke(progressed=False)
    assert before.chunk_bytes == MOST // 4


def test_a_few_bytes_now_and_then_do_not_say_that_the_link_is_slow():
    pace = carried(1_000_000)
    for number in range(100):
        pace.sent(URGENT, number + 1, float(number), full=False)
        pace.told(URGENT, number + 1, 1, number + 0.5)
    assert pace.rate == pytest.approx(1_000_000)


def test_a_chunk_that_was_long_on_its_way_does_not_make_the_link_look_quick():
    """An urgent chunk is sent just before the big one arrives that was sent long before it."""
    pace = carried(1_000_000)
    pace.sent(BULK, 1 << 40, 100.0, full=True)
    pace.sent(URGENT, 1, 100.245, full=False)
    pace.told(BULK, 1 << 40, 250_000, 100.25)
    pace.told(URGENT, 1, 1, 100.25)
    assert pace.rate == pytest.approx(1_000_000, rel=0.01)


def test_one_chunk_of_the_bulk_lane_is_on_its_way_where_that_keeps_a_near_link_busy():
    pace = carried(1_000_000)
    chunk = pace.chunk_bytes
    pace.rtt_s = 0.001
    assert pace.may_send(BULK, 0, ROOM)
    assert not pace.may_send(BULK, chunk, ROOM)
    assert pace.may_send(URGENT, chunk, ROOM)
    pace.rtt_s = 0.1
    assert pace.may_send(BULK, chunk, ROOM)
    assert not pace.may_send(BULK, int(FLIGHT_S * 1_000_000), ROOM)


def test_nothing_is_sent_without_room():
    assert not Pace(MOST).may_send(URGENT, 0, 0)
    assert Pace(MOST).may_send(URGENT, 0, 1)


def test_only_so_many_chunks_are_on_their_way():
    pace = Pace(MOST)
    for number in range(MAX_FLIGHTS):
        assert pace.may_send(URGENT, number, ROOM)
        pace.sent(URGENT, number + 1, 0.0, full=False)
    assert not pace.may_send(URGENT, MAX_FLIGHTS, ROOM)
    assert pace.may_send(BULK, 0, ROOM)


@pytest.mark.parametrize("size", [100, 5_000, 400_000])
def test_a_bucket_keeps_its_rate(size: int):
    rate, now_s, sent = 1_000_000, 0.0, 0
    bucket = TokenBucket(rate, now_s)
    while now_s < 10.0:
        wait_s = bucket.wait_s(now_s)
        if wait_s:
            now_s += wait_s
            continue
        bucket.spend(size)
        sent += size
    assert 10 * rate <= sent <= 10 * rate + size + 100


def test_what_was_not_used_is_not_saved_for_long():
    bucket = TokenBucket(1000, 0.0)
    assert bucket.wait_s(1000.0) == 0.0
    bucket.spend(100)
    assert bucket.wait_s(1000.0) == pytest.approx(0.05)


def test_without_a_limit_nobody_waits():
    bucket = TokenBucket(None, 0.0)
    bucket.spend(10**12)
    assert bucket.wait_s(0.0) == 0.0
