"""What waits costs nothing: a chunk takes time for its own messages alone."""

import random

import pytest

from megatron_opd.wire.link import sending
from megatron_opd.wire.link.sending import Outgoing, SendLane

PART = 100
MESSAGES = 500


def lane_of(messages: int) -> SendLane:
    lane = SendLane()
    for _ in range(messages):
        lane.queue([memoryview(bytes(PART))])
    return lane


class Counted(Outgoing):
    """Counts how often any message is looked at."""

    looks = 0

    @property
    def stop(self) -> int:
        Counted.looks += 1
        return self._stop

    @stop.setter
    def stop(self, place: int) -> None:
        self._stop = place


def test_a_chunk_looks_at_its_own_messages_however_many_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sending, "Outgoing", Counted)
    lane = lane_of(MESSAGES)
    size = lane.queued // MESSAGES
    lane.draw(size * MESSAGES // 2)
    Counted.looks = 0
    drawn = lane.draw(size)
    assert drawn is not None
    assert len(drawn[1]) == 1
    assert 0 < Counted.looks < 10
    Counted.looks = 0
    lane.told(lane.sent, 0, again=False)
    assert Counted.looks < 10


@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_cut_at_the_same_bytes_wherever_sending_goes_on(seed: int):
    """The pieces of a chunk lie one behind another, each in its own message."""
    chance = random.Random(seed)
    lane = lane_of(40)
    arrived = settled = 0
    while settled < lane.queued:
        if (drawn := lane.draw(chance.randint(1, 700))) is not None:
            at, pieces = drawn
            for message, start, stop in pieces:
                assert message.start <= start == at < stop <= message.stop
                at = stop
            assert at == lane.sent
        if chance.random() < 0.5:
            arrived = chance.randint(arrived, lane.sent)
            whole = arrived // (lane.queued // 40) * (lane.queued // 40)
            settled = chance.choice([settled, whole])
            again = chance.random() < 0.4
            lane.told(arrived, settled, again=again)
            assert lane.sent == arrived or not again
    assert lane.waiting_bytes == 0
