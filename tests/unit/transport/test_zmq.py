"""The controller's socket against scripted ranks, and the columns of a rank's batch."""

import asyncio
import queue
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from megatron_opd.batching.rank_batch import RankBatch, rank_batch
from megatron_opd.batching.shares import shares
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.learner import channel as channel_module
from megatron_opd.learner.channel import Channel, ControllerLost, NotWelcome
from megatron_opd.transport import messages as m
from megatron_opd.transport.frames import COLUMNS, from_frames, to_frames
from megatron_opd.transport.zmq import Admission, LearnerError, RemoteLearner
from megatron_opd.types import Batch, Draws, Prompt, Rollout, Sample, VersionSpan
from sglang_bridge.protocol import BucketSpec, WeightPiece
from tests.support.wire import TOKEN, Rank, channel, config, drive, hello, router

FIGURES = m.UpdateMetrics(0, *(1.5,) * 3, 1, 1, 1, 0.0, 0.0, 0, *(1.0,) * 5, 1)


def make_sample(uid: int, tokens: int, version: int = 0) -> Sample:
    """Row t holds the ids t and t + 1; the path alternates between them."""
    rng = np.random.default_rng(uid)
    draws = Draws(
        offsets_T1=np.arange(tokens + 1, dtype=np.int64) * 2,
        ids_N=np.stack([np.arange(tokens), np.arange(tokens) + 1], 1).flatten().astype(np.int32),
        weight_N=np.full(2 * tokens, 0.5, np.float32),
        sampler_logp_N=rng.normal(size=2 * tokens).astype(np.float32),
        path_T=np.arange(tokens, dtype=np.int64) * 2 + np.arange(tokens) % 2,
    )
    rollout = Rollout(
        Prompt(uid, "", np.arange(3 + uid % 3, dtype=np.int32) + 100 * uid),
        draws.ids_N[draws.path_T],
        draws,
        (VersionSpan(version, 0, 1), VersionSpan(version + 1, 1, tokens)),
        "stop",
        0.0,
        1.0,
    )
    return Sample(rollout, rng.normal(size=2 * tokens).astype(np.float32))


def make_batch(count: int = 8) -> Batch:
    return Batch(3, 4, tuple(make_sample(uid, 2 + uid) for uid in range(count)))


def make_shares(
    batch: Batch | None = None, sections: dict[str, object] | None = None, **learner: object
) -> list[RankBatch]:
    """A batch as the learner of `tests.support.wire.config` with these settings gets it."""
    tree = config(sections, **learner)
    group_size = tree.rollout.group_size
    return shares(batch or make_batch(), tree.learner, tree.estimator, group_size)


def done(request: m.Request) -> m.Reply:
    results = {
        m.Train: FIGURES,
        m.GetManifest: m.Manifest([BucketSpec(("a", "b"), ("float32",) * 2, ((2, 3), (4,)))]),
        m.DigestPieces: m.Digests(["d"]),
    }
    return m.Done(request.call, results.get(type(request), m.Nothing()))


def silent(request: m.Request) -> None:
    return None


def test_each_head_receives_exactly_its_own_samples():
    settings = {"num_mini_batches": 2, "max_tokens_per_microbatch": 30}
    whole = make_shares(parallel={"dp": 2}, **settings)

    async def body(remote: RemoteLearner) -> None:
        info = await remote.wait_ready(5)
        assert info.vocab_size == 512
        assert await remote.train(whole) == FIGURES

    ranks = drive(body, [done, silent], **settings)
    seen = []
    for rank in ranks:
        ((request, frames),) = rank.received
        assert isinstance(request, m.Train)
        assert (request.update, request.version) == (3, 4)
        share = from_frames(request.update, request.version, request.plan, frames)
        assert len(share.prompt_B) == 4
        ends = np.cumsum(share.prompt_B + share.response_B)
        seen += [int(ids[0]) // 100 for ids in np.split(share.ids, ends[:-1])]
        used = sorted(i for mini in request.plan for micro in mini for i in micro)
        assert used == [0, 1, 2, 3]
    assert sorted(seen) == list(range(8))


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
    advantage_of = {share.reward_B.item(): share.advantage_B.item() for share in split}
    assert advantage_of == {1.0: 0.5, 0.0: -0.5}
    first, second = (float(share.group_log_q_B[0]) for share in split)
    assert first == second, "one denominator for the whole group"


def test_every_call_gets_its_own_kind_of_answer():
    piece = WeightPiece(0, "a", 1, 2, 3, "float32", "x")

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        (bucket,) = await remote.manifest()
        assert bucket == BucketSpec(("a", "b"), ("float32",) * 2, ((2, 3), (4,)))
        await remote.connect_weights("127.0.0.1", 1234, 3, "group")
        await remote.send_weights()
        assert await remote.piece_digests([piece]) == ["d"]
        await remote.export_hf(Path("/somewhere"))
        await remote.stop()

    (rank,) = drive(body, [done])
    kinds = [type(request) for request, _ in rank.received]
    assert kinds == [
        m.GetManifest,
        m.ConnectWeights,
        m.SendWeights,
        m.DigestPieces,
        m.ExportHf,
        m.Stop,
    ]
    assert rank.received[3][0].pieces == [piece]


def test_a_failing_rank_fails_the_call_and_every_later_one_with_its_reason():
    def fail(request: m.Request) -> m.Reply:
        return m.Failed(1, "NotFinite: the loss is nan")

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        with pytest.raises(LearnerError, match="rank 1: NotFinite: the loss is nan"):
            await remote.train(make_shares(parallel={"dp": 2}))
        with pytest.raises(LearnerError, match="NotFinite"):
            await remote.manifest()

    drive(body, [silent, fail])


def test_silence_is_an_error_after_the_timeout():
    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        with pytest.raises(LearnerError, match=r"train: no answer from the learner within 0.2 s"):
            await remote.train(make_shares(), timeout_s=0.2)

    drive(body, [silent])


def test_a_rank_that_is_gone_is_an_error_of_the_learner_while_nothing_is_asked():
    async def main() -> None:
        remote = RemoteLearner(config(), Admission(TOKEN))
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
                await remote.manifest()
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
        assert (await remote.manifest())[0].names == ("a", "b")

    drive(body, [answer])


def test_an_answer_of_the_wrong_kind_is_refused():
    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        with pytest.raises(LearnerError, match="answered Manifest"):
            await remote.train(make_shares())

    drive(body, [lambda request: m.Done(request.call, m.Manifest([]))])


def test_calls_before_ready_after_close_and_on_a_world_of_the_wrong_size_fail():
    async def before(remote: RemoteLearner) -> None:
        with pytest.raises(LearnerError, match="not ready"):
            await remote.manifest()
        await remote.wait_ready(5)
        remote.close()
        with pytest.raises(LearnerError, match="closed"):
            await remote.manifest()

    drive(before, [done])

    async def main() -> None:
        remote = RemoteLearner(config(parallel={"dp": 2}), Admission(TOKEN))
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
        remote = RemoteLearner(config(), Admission(TOKEN))
        try:
            with pytest.raises(LearnerError, match="start: no answer"):
                await remote.wait_ready(0.1)
        finally:
            await remote.stop()

    asyncio.run(main())


def test_a_port_in_use_is_named():
    async def main() -> None:
        remote = RemoteLearner(config(), Admission(TOKEN))
        port = int(remote.address.rpartition(":")[2])
        try:
            with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
                RemoteLearner(config(listen_port=port), Admission(TOKEN))
        finally:
            remote.close()

    asyncio.run(main())


def columns_of(count: int) -> RankBatch:
    batch = make_batch(count)
    return rank_batch(batch.update, batch.version, batch.samples, [[list(range(count))]])


def test_columns_travel_unchanged():
    share = columns_of(4)
    back = from_frames(share.update, share.version, share.plan, to_frames(share))
    for name, dtype in COLUMNS.items():
        assert getattr(back, name).dtype == dtype
        np.testing.assert_array_equal(getattr(back, name), getattr(share, name))
    # path_T indexes into the columns, not into its own sample
    starts = np.cumsum(share.count_T) - share.count_T
    assert ((back.path_T >= starts) & (back.path_T < starts + back.count_T)).all()
    assert list(back.version_T[: back.response_B[0]]) == [0, 1]


@pytest.mark.parametrize("name", [name for name in COLUMNS if name not in ("prompt_B",)])
def test_a_truncated_column_is_refused(name: str):
    frames = dict(zip([*COLUMNS, "kind", "experts"], to_frames(columns_of(3)), strict=True))
    frames[name] = frames[name][: -COLUMNS[name].itemsize]
    with pytest.raises(ValueError, match="must have length"):
        from_frames(0, 0, [[[0]]], list(frames.values()))
    with pytest.raises(ValueError, match="16 columns, got 15 frames"):
        from_frames(0, 0, [[[0]]], list(frames.values())[1:])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routed_experts_travel_with_their_samples(dtype: type):
    batch = make_batch(3)
    rng = np.random.default_rng(5)
    parts = [
        rng.integers(0, 200, (sample.rollout.num_tokens - 1, 3, 2)).astype(dtype)
        for sample in batch.samples
    ]
    samples = [
        replace(sample, rollout=replace(sample.rollout, experts_XLk=part))
        for sample, part in zip(batch.samples, parts, strict=True)
    ]
    frames = to_frames(rank_batch(0, 0, samples, [[[0, 1, 2]]]))
    back = from_frames(0, 0, [[[0, 1, 2]]], frames)
    found = back.experts_of([2, 0])
    assert found is not None
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.concatenate([parts[2], parts[0]]))
    assert columns_of(3).experts_of([1]) is None
    with pytest.raises(ValueError, match="column experts_XLk must have length"):
        from_frames(0, 0, [[[0, 1, 2]]], [*frames[:-1], frames[-1][: -6 * parts[0].itemsize]])
    with pytest.raises(ValueError, match="got 2 of 3, 1 kinds"):
        rank_batch(0, 0, [*samples[:2], batch.samples[2]], [[[0, 1, 2]]])
    short = replace(samples[0], rollout=replace(samples[0].rollout, experts_XLk=parts[0][:-1]))
    with pytest.raises(ValueError, match="experts_XLk must have length"):
        rank_batch(0, 0, [short, *samples[1:]], [[[0, 1, 2]]])


@pytest.mark.parametrize("name", ["weight_N", "sampler_logp_N", "path_T"])
def test_a_malformed_sample_is_named(name: str):
    sample = make_sample(7, 4)
    draws = replace(sample.rollout.draws, **{name: getattr(sample.rollout.draws, name)[:-1]})
    broken = replace(sample, rollout=replace(sample.rollout, draws=draws))
    with pytest.raises(ValueError, match=f"sample 7: {name} must have length"):
        rank_batch(0, 0, [broken], [[[0]]])


HEAD = SimpleNamespace(is_head=True, parallel=ParallelConfig())


def test_a_rank_joins_receives_requests_and_reports_failures():
    with router() as (socket, address):
        rank = channel(address)
        answer = threading.Thread(target=lambda: welcome(socket))
        answer.start()
        try:
            assert rank.join(hello()) == m.Welcome(None, "", False)
            answer.join()
            rank.report(ValueError("learner.parallel:\n  tp \x1b[31m"))
            identity, frame = socket.recv_multipart()
            assert m.decode_reply([frame]) == m.Failed(0, "learner.parallel: tp \\x1b[31m")
            rank.report(RuntimeError("boom"))
            assert m.decode_reply(socket.recv_multipart()[1:]).reason == "RuntimeError: boom"
            socket.send_multipart([identity, m.encode(m.Stop(9)), b"raw"])
            request, frames = rank.receive(HEAD)
            assert request == m.Stop(9)
            assert [bytes(frame) for frame in frames] == [b"raw"]
        finally:
            rank.close()


def welcome(socket: zmq.Socket[bytes]) -> None:
    identity, frame = socket.recv_multipart()
    assert m.decode_reply([frame]) == hello()
    socket.send_multipart([identity, m.encode(m.Welcome(None, "", False))])


def test_a_rank_waits_for_a_token_and_gives_up_on_a_controller_that_never_was():
    asked: list[None] = []

    def none_yet() -> None:
        asked.append(None)

    rank = channel("tcp://127.0.0.1:9", none_yet, first_s=0.6)
    try:
        with pytest.raises(ControllerLost, match=r"no controller at tcp:.*:9 within 0\.6 s"):
            rank.join(hello())
        assert len(asked) > 1
        rank.report(ValueError("nobody hears it, and nothing waits"))
    finally:
        rank.close()


def test_a_rank_shows_the_token_of_the_controller_that_came_after_an_earlier_one():
    latest = ["a stale token that a crashed run left"]

    def read() -> str:
        return latest[0]

    with router() as (socket, address):
        rank = channel(address, read)
        threading.Timer(1.0, lambda: latest.__setitem__(0, TOKEN)).start()
        answer = threading.Thread(target=lambda: welcome(socket))
        answer.start()
        try:
            assert isinstance(rank.join(hello()), m.Welcome)
            answer.join()
            latest[0] = "a newer controller's token, which is not for this rank"
            rank.report(ValueError("last words"))
            assert m.decode_reply(socket.recv_multipart()[1:]) == m.Failed(0, "last words")
        finally:
            rank.close()


def test_a_rank_with_the_wrong_token_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "TOKEN_GRACE_S", 0.2)
    with router() as (_, address):
        rank = channel(address, lambda: "not the secret")
        try:
            with pytest.raises(NotWelcome, match="MEGATRON_OPD_TOKEN"):
                rank.join(hello())
        finally:
            rank.close()


def test_a_rank_that_is_refused_is_told_why_and_the_controller_fails():
    async def main() -> None:
        remote = RemoteLearner(config(), Admission(TOKEN, {"learner.optimizer.lr": "a"}))
        rank = channel(remote.address)
        try:
            said = hello(digests={"learner.optimizer.lr": "b"})
            joining = asyncio.create_task(asyncio.to_thread(rank.join, said))
            why = "rank 0 was started with other settings than the controller: learner.optimizer.lr"
            with pytest.raises(LearnerError, match=why):
                await remote.wait_ready(5)
            with pytest.raises(NotWelcome, match=why):
                await joining
        finally:
            remote.close()
            rank.close()

    asyncio.run(main())


def join(rank: Channel, socket: zmq.Socket[bytes]) -> None:
    """The rank joins and `socket` welcomes it."""
    answer = threading.Thread(target=lambda: welcome(socket))
    answer.start()
    rank.join(hello())
    answer.join()


def assert_told_of_the_end(rank: Channel, lost: queue.Queue[str]) -> None:
    try:
        assert lost.get(timeout=5) == f"the controller at {rank.address} is gone: this rank ends"
    finally:
        rank.close()


def test_a_controller_that_is_gone_is_noticed_by_a_rank_that_does_not_listen():
    """Its process ends: the kernel closes the connection."""
    lost = queue.Queue[str]()
    with router() as (socket, address):
        rank = channel(address, on_lost=lost.put)
        join(rank, socket)
    assert_told_of_the_end(rank, lost)


def test_a_controller_that_is_gone_before_its_welcome_was_read_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
):
    """The welcome waits in this rank's queue when the connection ends. Before: never noticed."""
    lost = queue.Queue[str]()
    with router() as (socket, address):
        rank = channel(address, on_lost=lost.put)
        slow = rank._events

        def slow_events(wait_s: float) -> list[int]:
            found = slow(wait_s)
            if rank._socket.poll(0):  # the welcome is there: now its sender ends
                socket.close()
                while channel_module._LOST not in found:
                    found += slow(0.1)
            return found

        monkeypatch.setattr(rank, "_events", slow_events)
        join(rank, socket)
    assert_told_of_the_end(rank, lost)
