"""A batch whose samples data workers hold: what the controller does if ranks cannot take them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.data_workers.pool import WorkersUnreachable
from megatron_opd.records.types import Batch, HeldSample
from megatron_opd.run import batch_learner
from megatron_opd.run.batch_learner import BatchLearner
from megatron_opd.transport.messages import UpdateMetrics
from tests.support.batches import FIGURES
from tests.support.data_workers import held
from tests.support.wire import config

SOURCE = ("tcp://worker:0", "k")


class Remote:
    """Answers an update with what it was given, in turn; the last one again and again."""

    def __init__(self, *answers: UpdateMetrics | None) -> None:
        self.answers, self.asked = answers, 0

    async def train_held(
        self, parts: Any, sources: dict[int, Any], bound: None
    ) -> UpdateMetrics | None:
        assert sources == {0: SOURCE, 1: SOURCE}
        self.asked += 1
        return self.answers[min(self.asked, len(self.answers)) - 1]


class Pool:
    """Knows that samples are lost after it was asked so often; None: they never are."""

    def __init__(self, lost_after: int | None) -> None:
        self.lost_after, self.asked = lost_after, 0

    def source(self, sample: HeldSample) -> tuple[str, str]:
        return SOURCE

    async def loses_one_of(self, samples: Sequence[HeldSample], within_s: float) -> bool:
        assert [sample.rollout.prompt.uid for sample in samples] == [0, 1]
        assert within_s == batch_learner.ASK_AGAIN_S
        self.asked += 1
        return self.asked == self.lost_after


def train(remote: Remote, pool: Pool) -> UpdateMetrics:
    samples = tuple(map(held, range(2)))
    stand_ins: Any = remote, pool
    return asyncio.run(BatchLearner(config(), *stand_ins).train(Batch(0, 0, samples)))


def test_ranks_that_could_not_take_samples_of_a_worker_that_is_there_are_asked_again():
    remote, pool = Remote(None, None, FIGURES), Pool(None)
    assert train(remote, pool) is FIGURES
    assert (remote.asked, pool.asked) == (3, 2)


def test_a_batch_of_a_worker_that_is_lost_is_given_back():
    remote, pool = Remote(None), Pool(2)
    with pytest.raises(SamplesLost, match="update 0: a data worker was lost"):
        train(remote, pool)
    assert (remote.asked, pool.asked) == (2, 2)


def test_ranks_that_cannot_take_samples_for_too_long_end_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_learner, "UNREACHABLE_S", 0)
    with pytest.raises(WorkersUnreachable, match=r"take all samples of data worker 0 for 0 s; "):
        train(Remote(None), Pool(None))
