"""The controller's socket against scripted ranks."""

import asyncio
import queue
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_opd.errors import LearnerError
from megatron_opd.learner.channel import ControllerChannel
from megatron_opd.records.types import Batch
from megatron_opd.transport import messages as m
from megatron_opd.transport.frames import from_frames
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from sglang_bridge.protocol import WeightPiece
from tests.support.batches import FIGURES, SCORES, done, make_batch, make_shares, silent
from tests.support.wire import KEYS, Rank, channel, config, drive, hello


def test_each_head_receives_exactly_its_own_samples():
    settings = {"num_mini_batches": 2, "max_tokens_per_microbatch": 30}
    whole = make_shares(parallel={"dp": 2}, **settings)

    async def body(remote: RemoteLearner) -> None:
        info = await remote.wait_ready(5)
        assert info.vocab_size == 512
        assert await remote.train(whole) == FIGURES

    ranks = drive(body, [done, silent], heard=1, **settings)
    seen = []
    for rank in ranks:
        ((request, frames),) = rank.received
        assert isinstance(request, m.Train)
        assert (request.update, request.version) == (3, 4)
        share = from_frames(request.update, request.version, request.plan, frames)
        assert len(share.length_B) == 4
        ends = np.cumsum(share.length_B)
        seen += [int(ids[0]) // 100 for ids in np.split(share.ids_S, ends[:-1])]
        used = sorted(i for mini in request.plan for micro in mini for i in micro)
        assert used == [0, 1, 2, 3]
    assert sorted(seen) == list(range(8))


def test_every_head_scores_its_own_share_and_rank_0_answers_for_all():
    whole = make_shares(parallel={"dp": 2})

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        assert await remote.score(whole, replay="gates") == SCORES

    ranks = drive(body, [done, silent], heard=1)
    for rank, share in zip(ranks, whole, strict=True):
        ((request, frames),) = rank.received
        assert request == m.ScoreShare(1, share.version, share.plan, "gates")
        found = from_frames(0, request.version, request.plan, frames)
        assert found.ids_S.tolist() == share.columns().ids_S.tolist()


def test_a_group_split_over_ranks_keeps_the_advantages_of_the_whole():
    samples = [replace(s, reward=float(i == 0)) for i, s in enumerate(make_batch(2).samples)]
    gepo = {
        "rollout": {"group_size": 2},
        "support": {"type": "path"},
        "objective": {"type": "gepo"},
        "data": {"train": "x", "task": "exact"},
        "buffer": {"batch_size": 2},
    }
    split = make_shares(Batch(0, 0, tuple(samples)), gepo, parallel={"dp": 2})
    split = [share.columns() for share in split]
    advantage_of = {int(share.ids_S[0]) // 100: share.advantage_B.item() for share in split}
    assert advantage_of == {0: 0.5, 1: -0.5}
    first, second = (float(share.group_log_q_B[0]) for share in split)
    assert first == second, "one denominator for the whole group"


def test_every_call_gets_its_own_kind_of_answer():
    piece = WeightPiece(0, "a", 1, 2, 3, "float32", "x")

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        assert await remote.move_weights(b"move") == b"moved"
        assert await remote.piece_digests([piece]) == ["d"]
        await remote.export_hf(Path("/somewhere"))
        await remote.offload()
        await remote.onload()
        await remote.stop()

    (rank,) = drive(body, [done], heard=4)
    kinds = [type(request) for request, _ in rank.received]
    assert kinds == [
        m.MoveWeights,
        m.DigestPieces,
        m.ExportHf,
        m.Offload,
        m.Onload,
        m.Stop,
    ]
    assert rank.received[0][0].payload == b"move"
    assert rank.received[1][0].pieces == [piece]


def test_a_failing_rank_fails_the_call_and_every_later_one_with_its_reason():
    def fail(request: m.Request) -> m.Reply:
        return m.RankError(1, "NotFinite: the loss is nan")

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        with pytest.raises(LearnerError, match="rank 1: NotFinite: the loss is nan"):
            await remote.train(make_shares(parallel={"dp": 2}))
        with pytest.raises(LearnerError, match="NotFinite"):
            await remote.move_weights(b"")

    drive(body, [silent, fail])


def test_silence_is_an_error_after_the_timeout():
    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        with pytest.raises(LearnerError, match=r"train: no answer from the learner within 0.2 s"):
            await remote.train(make_shares(), timeout_s=0.2)

    drive(body, [silent])


def test_a_rank_that_is_gone_is_an_error_of_the_learner_while_nothing_is_asked():
    async def main() -> None:
        remote = RemoteLearner(config(), Admission(KEYS))
        rank = Rank(remote.address, 0, 1, done)
        task = asyncio.create_task(rank.run())
        try:
            await remote.wait_ready(5)
            await remote.train(make_shares())
            task.cancel()
            rank.context.destroy(linger=0)
            async with asyncio.timeout(5):
                error = await remote.failed()
            assert str(error) == "learner rank 0 is gone: its connection ended"
            with pytest.raises(LearnerError, match="rank 0 is gone"):
                await remote.move_weights(b"")
        finally:
            remote.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_late_answer_is_not_taken_for_the_next_one():
    late: list[m.Request] = []

    def answer(request: m.Request) -> m.Reply | None:
        if not late:
            late.append(request)
            return None
        return done(request)

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        with pytest.raises(LearnerError):
            await remote.train(make_shares(), timeout_s=0.1)
        assert await remote.move_weights(b"") == b"moved"

    drive(body, [answer])


def test_a_silent_learner_may_be_lost_until_it_answers_again():
    said: list[m.Request] = []

    def answer(request: m.Request) -> m.Reply | None:
        said.append(request)
        return None if len(said) == 1 else done(request)

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        assert remote.failure is None
        with pytest.raises(LearnerError):
            await remote.train(make_shares(), timeout_s=0.1)
        assert remote.failure is not None
        assert not remote.failure.final
        await remote.move_weights(b"")
        assert remote.failure is None

    drive(body, [answer])


@pytest.mark.parametrize("final", [False, True])
def test_a_rank_says_whether_another_learner_would_end_so_too(final: bool):
    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        with pytest.raises(LearnerError) as caught:
            await remote.move_weights(b"")
        assert caught.value.final is final
        remote.start_over()
        assert remote.failure is None
        assert not remote.ready, "another learner is awaited"

    drive(body, [lambda request: m.RankError(0, "RuntimeError: lost", final)])


def test_a_lost_learner_s_other_ranks_end_and_another_learner_joins():
    """Before: they kept their connections, and waited for work for ever."""
    told: list[queue.Queue[str]] = [queue.Queue() for _ in range(4)]

    async def joined(
        remote: RemoteLearner, said: list[queue.Queue[str]]
    ) -> list[ControllerChannel]:
        ends = [channel(remote.address, on_lost=lost.put) for lost in said]
        joins = [asyncio.to_thread(end.join, hello(i, 2)) for i, end in enumerate(ends)]
        await asyncio.gather(remote.wait_ready(5), *joins)
        return ends

    async def main() -> None:
        remote = RemoteLearner(config(parallel={"dp": 2}), Admission(KEYS, {}, 512))
        ends: list[ControllerChannel] = []
        try:
            first, lost = await joined(remote, told[:2])
            ends.append(first)
            await asyncio.to_thread(lost.close)
            assert str(await remote.failed()) == "learner rank 1 is gone: its connection ended"
            assert told[0].empty()
            remote.start_over()
            waiting = asyncio.create_task(remote.wait_ready(20))
            gone = f"the controller at {remote.address} is gone: this rank ends"
            assert await asyncio.to_thread(told[0].get, timeout=20) == gone
            # what it still has to say is not about the learner that comes
            first.report(RuntimeError("a peer is gone"), final=True)
            while not remote.frames_refused:  # noqa: ASYNC110  it is a count
                await asyncio.sleep(0.01)
            assert remote.failure is None
            ends += await joined(remote, told[2:])
            await waiting
            assert told[2].empty()
            assert told[3].empty()
        finally:
            remote.close()
            for end in ends:
                end.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_answer_of_the_wrong_kind_is_refused():
    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        with pytest.raises(LearnerError, match="answered WeightsMoved"):
            await remote.train(make_shares())

    drive(body, [lambda request: m.RankDone(request.call, m.WeightsMoved(b""))])


def test_calls_before_ready_after_close_and_on_a_world_of_the_wrong_size_fail():
    async def before(remote: RemoteLearner) -> None:
        with pytest.raises(LearnerError, match="not ready"):
            await remote.move_weights(b"")
        await remote.wait_ready(5)
        remote.close()
        with pytest.raises(LearnerError, match="closed"):
            await remote.move_weights(b"")

    drive(before, [done])

    async def main() -> None:
        remote = RemoteLearner(config(parallel={"dp": 2}), Admission(KEYS))
        rank = Rank(remote.address, 0, 1, done)
        task = asyncio.create_task(rank.run())
        try:
            with pytest.raises(LearnerError, match="has 1 ranks"):
                await remote.wait_ready(5)
        finally:
            task.cancel()
            remote.close()
            rank.context.destroy(linger=0)

    asyncio.run(main())


def test_nobody_comes():
    async def main() -> None:
        remote = RemoteLearner(config(), Admission(KEYS))
        try:
            with pytest.raises(LearnerError, match="start: no answer"):
                await remote.wait_ready(0.1)
        finally:
            await remote.stop()

    asyncio.run(main())


def test_a_port_in_use_is_named():
    async def main() -> None:
        remote = RemoteLearner(config(), Admission(KEYS))
        port = int(remote.address.rpartition(":")[2])
        try:
            with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
                RemoteLearner(config(listen_port=port), Admission(KEYS))
        finally:
            remote.close()

    asyncio.run(main())
