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
