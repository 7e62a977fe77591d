"""Which samples a batch takes where the order is that of completion."""

import pytest

from megatron_opd.buffer.completion import CompletionBuffer
from tests.support.fakes import make_sample


def filled(buffer: CompletionBuffer, version: int, *uids: int) -> None:
    for uid in uids:
        buffer.admit(uid, version)


def put(buffer: CompletionBuffer, *uids: int) -> None:
    for uid in uids:
        buffer.put(make_sample(uid))


def taken(buffer: CompletionBuffer, count: int) -> list[int]:
    return [sample.rollout.prompt.uid for sample in buffer.take(count)]


def test_what_is_finished_first_is_taken_first():
    buffer = CompletionBuffer(2, 1, max_age=3)
    filled(buffer, 0, *range(6))
    put(buffer, 5, 3, 1)
    assert (buffer.ready, buffer.scored, buffer.waiting_for_score) == (3, 3, 3)
    assert taken(buffer, 2) == [5, 3]
    assert [uid for uid, _ in buffer.in_line()] == [0, 1, 2, 4]


def test_a_due_sample_is_waited_for_and_goes_first():
    buffer = CompletionBuffer(2, 1, max_age=1)
    filled(buffer, 0, 0, 1, 2, 3)  # due by update 1: batches 0 and 1 hold nothing else
    filled(buffer, 1, 4, 5)
    put(buffer, 5, 4)
    assert buffer.ready == 0, "later ones must wait"
    put(buffer, 3, 1)
    assert taken(buffer, 2) == [3, 1]
    put(buffer, 0)
    assert buffer.ready == 0
    put(buffer, 2)
    assert taken(buffer, 2) == [0, 2]
    assert taken(buffer, 2) == [5, 4]
    with pytest.raises(ValueError, match="0 are ready"):
        buffer.take(1)


def test_a_dropped_sample_is_due_no_longer():
    buffer = CompletionBuffer(1, 1, max_age=0)
    filled(buffer, 0, 0)
    filled(buffer, 1, 1)
    put(buffer, 1)
    assert buffer.ready == 0
    buffer.drop(0)
    assert taken(buffer, 1) == [1]


def test_groups_are_taken_whole_and_withdrawn_whole():
    buffer = CompletionBuffer(2, 2, max_age=5)
    filled(buffer, 0, *range(6))
    put(buffer, 4, 0, 3)
    assert buffer.ready == 0, "no group is complete"
    put(buffer, 5)
    assert taken(buffer, 2) == [4, 5]
    buffer.drop(2)
    assert buffer.withdraw(range(2, 4)) == [3]
    put(buffer, 1)
    assert taken(buffer, 2) == [0, 1]
    assert buffer.in_line() == []


def test_the_rest_is_given_out_at_the_end():
    buffer = CompletionBuffer(4, 1, max_age=2)
    filled(buffer, 0, 0, 1)
    put(buffer, 1)
    buffer.close()
    assert (buffer.ready, buffer.exhausted) == (1, False)
    put(buffer, 0)
    assert buffer.exhausted
    assert taken(buffer, 2) == [1, 0]


def test_a_group_is_due_by_its_oldest_member():
    """Of a resumed run: the first member is sampled anew, the second kept its older version."""
    buffer = CompletionBuffer(2, 2, max_age=1, updates=1)
    filled(buffer, 3, 0)
    filled(buffer, 0, 1)
    filled(buffer, 3, 2, 3)
    put(buffer, 2, 3)
    assert buffer.ready == 0, "the first group is due, as its second member is"
    put(buffer, 0, 1)
    assert taken(buffer, 2) == [0, 1]


def test_a_batch_that_is_put_back_is_taken_again_and_keeps_its_deadlines():
    buffer = CompletionBuffer(2, 1, max_age=1)
    filled(buffer, 0, 0, 1, 2, 3)  # due by update 1
    filled(buffer, 1, 4, 5)
    put(buffer, 3, 5, 1)
    batch = buffer.take(2)
    assert [sample.rollout.prompt.uid for sample in batch] == [3, 1]
    buffer.put_back(batch)
    assert [uid for uid, _ in buffer.in_line()] == [0, 1, 2, 3, 4, 5], "in order of admission"
    assert (buffer.ready, buffer.scored, buffer.waiting_for_score) == (3, 3, 3)
    assert buffer.take(2) == batch
    put(buffer, 4)
    assert buffer.ready == 0, "0 and 2 must be in the next batch"
    put(buffer, 0, 2)
    assert taken(buffer, 2) == [0, 2]


def test_a_lost_sample_of_a_batch_that_was_put_back_is_waited_for():
    buffer = CompletionBuffer(2, 1, max_age=0)
    filled(buffer, 0, 0, 1)
    filled(buffer, 1, 2, 3)
    put(buffer, 1, 0, 2, 3)
    buffer.put_back(buffer.take(2))
    found = buffer.reopen(1)
    assert found is not None
    assert found.rollout.prompt.uid == 1
    assert buffer.ready == 0, "1 is due now"
    put(buffer, 1)
    assert sorted(taken(buffer, 2)) == [0, 1]
    assert taken(buffer, 2) == [2, 3]


def test_a_group_with_a_reopened_member_is_not_finished():
    buffer = CompletionBuffer(2, 2, max_age=5)
    filled(buffer, 0, 0, 1, 2, 3)
    put(buffer, 0, 1, 2, 3)
    assert buffer.reopen(1) is not None
    assert buffer.reopen(1) is None
    assert (buffer.ready, buffer.scored, buffer.waiting_for_score) == (2, 3, 1)
    assert taken(buffer, 2) == [2, 3]
    with pytest.raises(ValueError, match="0 are ready"):
        buffer.take(2)
    put(buffer, 1)
    assert taken(buffer, 2) == [0, 1]


def test_a_reopened_member_that_is_dropped_ends_its_group():
    buffer = CompletionBuffer(2, 2, max_age=1)
    filled(buffer, 0, 0, 1, 2, 3)
    put(buffer, 0, 1, 2, 3)
    buffer.reopen(1)
    buffer.drop(1)
    assert buffer.withdraw([0, 1]) == [0]
    buffer.close()
    assert taken(buffer, 2) == [2, 3]
    assert buffer.exhausted


def test_what_is_put_back_goes_before_what_was_finished_later():
    buffer = CompletionBuffer(2, 1, max_age=5)
    filled(buffer, 0, 0, 1, 2, 3)
    put(buffer, 2, 0, 1)
    buffer.put_back(buffer.take(2))
    assert taken(buffer, 2) == [2, 0]
