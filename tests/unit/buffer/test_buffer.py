"""Admission order, holes and partial last batches of the buffer."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.buffer.batcher import Batcher
from megatron_opd.buffer.buffer import SampleBuffer
from megatron_opd.sim.clock import run_virtual
from tests.support.fakes import make_sample


def uids(samples):
    return [sample.rollout.prompt.uid for sample in samples]


def test_batches_wait_for_the_front_of_the_line():
    async def scenario():
        buffer = SampleBuffer()
        batcher = Batcher(buffer, 2)
        for uid in range(4):
            buffer.admit(uid, 0)
        for uid in (3, 2, 1):
            buffer.put(make_sample(uid))
        assert (buffer.ready, buffer.scored, buffer.waiting_for_score) == (0, 3, 1)
        batch = asyncio.create_task(batcher.next_batch())
        await asyncio.sleep(1)
        assert not batch.done()
        buffer.put(make_sample(0))
        assert uids(await batch) == [0, 1]
        assert uids(await batcher.next_batch()) == [2, 3]

    run_virtual(scenario())


def test_a_dropped_head_leaves_no_gap():
    async def scenario():
        buffer = SampleBuffer()
        for uid in range(3):
            buffer.admit(uid, 0)
        buffer.put(make_sample(1))
        buffer.put(make_sample(2))
        batch = asyncio.create_task(Batcher(buffer, 2).next_batch())
        await asyncio.sleep(1)
        buffer.drop(0)
        assert uids(await batch) == [1, 2]

    run_virtual(scenario())


@settings(max_examples=200, deadline=None)
@given(
    order=st.permutations(range(12)),
    dropped=st.sets(st.integers(0, 11)),
    batch_size=st.integers(1, 5),
)
def test_any_arrival_order_gives_admission_order(order, dropped, batch_size):
    async def scenario():
        buffer = SampleBuffer()
        for uid in range(12):
            buffer.admit(uid, 0)

        async def arrive():
            for uid in order:
                await asyncio.sleep(1)
                if uid in dropped:
                    buffer.drop(uid)
                else:
                    buffer.put(make_sample(uid))
            buffer.close()

        arriving = asyncio.create_task(arrive())
        batches = []
        batcher = Batcher(buffer, batch_size)
        while batch := await batcher.next_batch():
            batches.append(uids(batch))
        await arriving
        kept = [uid for uid in range(12) if uid not in dropped]
        assert [uid for batch in batches for uid in batch] == kept
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert buffer.exhausted
        assert buffer.scored == 0

    run_virtual(scenario())


def test_scored_samples_can_be_withdrawn_wherever_they_are():
    async def scenario():
        buffer = SampleBuffer()
        for uid in range(8):
            buffer.admit(uid, 0)
        for uid in (0, 1, 2, 5, 6):
            buffer.put(make_sample(uid))
        batch = asyncio.create_task(Batcher(buffer, 4).next_batch())
        await asyncio.sleep(1)
        # 1 and 2 are ready, 5 waits behind others, 3 and 7 are not scored, 9 was never admitted
        assert buffer.withdraw([1, 2, 3, 5, 7, 9]) == [1, 2, 5]
        assert (buffer.ready, buffer.scored, buffer.waiting_for_score) == (1, 2, 3)
        buffer.drop(4)
        buffer.put(make_sample(3))
        buffer.put(make_sample(7))
        assert uids(await batch) == [0, 3, 6, 7]
        buffer.close()
        assert buffer.exhausted

    run_virtual(scenario())


def test_batches_are_held_back_until_more_lie_behind_them():
    async def scenario():
        buffer = SampleBuffer()
        batcher = Batcher(buffer, 2, hold_batches=2)
        for uid in range(7):
            buffer.admit(uid, 0)
        for uid in range(5):
            buffer.put(make_sample(uid))
        batch = asyncio.create_task(batcher.next_batch())
        await asyncio.sleep(1)
        assert not batch.done()
        buffer.put(make_sample(5))
        assert uids(await batch) == [0, 1]
        batch = asyncio.create_task(batcher.next_batch())
        await asyncio.sleep(1)
        buffer.close()
        await asyncio.sleep(1)
        assert not batch.done(), "one sample is still to come"
        buffer.put(make_sample(6))
        assert uids(await batch) == [2, 3]
        assert [uids(await batcher.next_batch()) for _ in range(3)] == [[4, 5], [6], []]

    run_virtual(scenario())


def test_an_empty_closed_buffer_gives_an_empty_batch():
    async def scenario():
        buffer = SampleBuffer()
        buffer.close()
        assert await Batcher(buffer, 3).next_batch() == ()

    run_virtual(scenario())


def test_misuse_is_refused():
    buffer = SampleBuffer()
    buffer.admit(0, 0)
    with pytest.raises(ValueError, match="prompt 0 was admitted twice"):
        buffer.admit(0, 0)
    with pytest.raises(ValueError, match="prompt 5 is not waiting"):
        buffer.put(make_sample(5))
    buffer.admit(1, 0)
    buffer.put(make_sample(1))
    with pytest.raises(ValueError, match="prompt 1 is not waiting"):
        buffer.drop(1)
    with pytest.raises(ValueError, match="1 samples were asked for, 0 are ready"):
        buffer.take(1)
    buffer.close()
    with pytest.raises(ValueError, match="prompt 9 was admitted after"):
        buffer.admit(9, 0)


def filled(count: int, *scored: int) -> SampleBuffer:
    buffer = SampleBuffer()
    for uid in range(count):
        buffer.admit(uid, 0)
    for uid in scored:
        buffer.put(make_sample(uid))
    return buffer


def held(buffer: SampleBuffer) -> list[tuple[int, bool]]:
    return [(uid, sample is not None) for uid, sample in buffer.in_line()]


def test_a_reopened_prompt_waits_again_in_its_place():
    buffer = filled(5, 0, 1, 2, 4)
    sample = buffer.reopen(1)
    assert sample is not None
    assert sample.rollout.prompt.uid == 1
    assert held(buffer) == [(0, True), (1, False), (2, True), (3, False), (4, True)]
    assert (buffer.ready, buffer.scored, buffer.waiting_for_score) == (1, 3, 2)
    buffer.put(make_sample(1))
    assert uids(buffer.take(3)) == [0, 1, 2]


def test_what_is_unscored_or_gone_is_not_reopened():
    buffer = filled(3, 0, 1)
    assert uids(buffer.take(1)) == [0]
    assert [buffer.reopen(uid) for uid in (0, 2, 7)] == [None, None, None]
    assert held(buffer) == [(1, True), (2, False)]
    assert (buffer.ready, buffer.waiting_for_score) == (1, 1)
    with pytest.raises(ValueError, match="prompt 0 is not waiting"):
        buffer.put(make_sample(0))


def test_a_reopened_prompt_may_be_dropped_and_replaced_after_admission_ended():
    buffer = filled(2, 0, 1)
    buffer.close()
    assert buffer.exhausted
    buffer.reopen(1)
    assert (buffer.closed, buffer.exhausted) == (False, False)
    buffer.drop(1)
    buffer.admit(2, 0)
    buffer.put(make_sample(2))
    assert uids(buffer.take(2)) == [0, 2]


def test_a_batch_that_is_put_back_is_taken_again():
    buffer = filled(6, 0, 1, 2, 3, 5)
    batch = buffer.take(2)
    buffer.put_back(batch)
    assert held(buffer) == [(uid, uid != 4) for uid in range(6)]
    assert (buffer.ready, buffer.scored, buffer.waiting_for_score) == (4, 5, 1)
    assert buffer.take(2) == batch
    buffer.put_back(batch)
    buffer.reopen(0)
    assert buffer.ready == 0
    with pytest.raises(ValueError, match="0 are ready"):
        buffer.take(1)
    with pytest.raises(ValueError, match="prompt 1 is not waiting"):
        buffer.put(make_sample(1))


def test_who_waits_is_woken_by_what_is_reopened_and_put_back():
    async def scenario():
        buffer = filled(2, 0, 1)
        for change in (lambda: buffer.reopen(1), lambda: buffer.put_back(buffer.take(1))):
            waiting = asyncio.create_task(buffer.changed())
            await asyncio.sleep(1)
            change()
            await asyncio.wait_for(waiting, 1)

    run_virtual(scenario())
