"""The controller's end of data workers, with workers that are scripted."""

import asyncio
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.data_workers import messages as w
from megatron_opd.data_workers.faults import failed
from megatron_opd.data_workers.pool import WorkerPool, WorkersLost
from megatron_opd.data_workers.requests import decode_request
from megatron_opd.records.types import HeldSample, Rollout, Sample, VersionSpan
from megatron_opd.wire.keys import RankKeys, RunKeys
from sglang_bridge.errors import ServerUnreachable
from tests.support.data_workers import (
    SAMPLE,
    SHAPE,
    SIZE,
    URLS,
    Peer,
    all_lost,
    drive,
    generated,
    refused,
    reply_to,
    sampled,
    scored,
)
from tests.support.wire import KEYS


def test_a_sample_passes_every_stage_and_its_arrays_come_when_they_are_asked_for():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        rollout = await sampled(pool, 5)
        assert (rollout.num_response_tokens, rollout.num_ids, rollout.cache) == (4, 8, SIZE)
        assert (rollout.spans, rollout.finish_reason) == ((VersionSpan(3, 0, 4),), "stop")
        assert (rollout.worker, rollout.key, rollout.engine) == ("data worker 0", "r-5", URLS[0])
        order = await peers[0].heard(w.Generate)
        request = decode_request(order.request)
        assert list(request.input_ids) == [1, 2, 3]
        assert (request.rid, request.seed, order.endpoint.url) == ("r-5", 5, URLS[0])
        assert await pool.judge(rollout, "exact", "42") == 0.5
        sample = await scored(pool, rollout)
        assert (sample.shape, sample.rollout.num_ids, sample.reward) == (SHAPE, 8, 0.5)
        # a later try has another name at the server
        first = (await peers[0].heard(w.ScoreCall)).ask.rid
        await scored(pool, rollout)
        assert (await peers[0].heard(w.ScoreCall, 2)).ask.rid != first
        assert first.startswith("score-0-")
        assert pool.holds(sample)
        assert pool.source(sample) == ("tcp://worker:1", "r-5")
        rollout = replace(sample.rollout, started_s=3.0, finished_s=5.0, restarts=2)
        sample = replace(sample, rollout=rollout, masked=True, overlong_penalty=-0.5)
        whole = await pool.sample(sample)
        assert isinstance(whole, Sample)
        assert (whole.reward, whole.overlong_penalty, whole.masked) == (0.5, -0.5, True)
        for name in ("prompt", "started_s", "finished_s", "engine", "restarts"):
            assert getattr(whole.rollout, name) == getattr(rollout, name), name
        assert np.array_equal(whole.teacher_logp_N, SAMPLE.teacher_logp_N)
        found = await pool.whole(rollout)
        assert isinstance(found, Rollout)
        assert peers[1].orders == []
        newer = await sampled(pool, 5)
        assert pool.holds(HeldSample(newer, None))
        earlier = HeldSample(replace(rollout, key="r-of-old"), None)
        assert not pool.holds(earlier)
        with pytest.raises(SamplesLost):
            pool.source(earlier)
        pool.release([5, 99])
        assert await peers[0].heard(w.Release, 2) == w.Release(["r-5"])
        assert not pool.holds(sample)

    drive(body)


def test_arrays_can_be_waited_for_in_a_thread():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        rollout = await sampled(pool, 0)
        found = await asyncio.to_thread(pool.fetch(rollout).result, 30)
        assert isinstance(found, Rollout)
        pool.release([0])
        with pytest.raises(SamplesLost):
            await asyncio.to_thread(pool.fetch(rollout).result, 30)

    drive(body)


def test_servers_are_shared_out_evenly_and_stay_where_they_are():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        for _ in range(2):
            for uid, url in enumerate(URLS):
                await sampled(pool, uid, url)
        for peer in peers:
            orders = [order for order in peer.orders if isinstance(order, w.Generate)]
            assert len({order.endpoint.url for order in orders}) == len(URLS) / 2
            assert len(orders) == len(URLS)

    drive(body)


def test_an_error_of_a_call_arrives_as_what_it_was():
    error = ServerUnreachable(URLS[0], "/generate", "reset", sent=False)

    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        peers[0].answer = lambda order: failed(getattr(order, "call", 0), error)
        with pytest.raises(ServerUnreachable, match="reset") as caught:
            await sampled(pool, 0)
        assert not caught.value.sent

    drive(body)


def test_a_response_that_nobody_waits_for_is_let_go_of():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        peers[0].answer = lambda order: None
        task = asyncio.ensure_future(sampled(pool, 0))
        order = await peers[0].heard(w.Generate)
        task.cancel()
        assert await peers[0].heard(w.Cancel) == w.Cancel(order.call)
        assert await peers[0].heard(w.Release) == w.Release(["r-0"])
        # the answer was on its way: it changes nothing
        await peers[0].socket.send(w.encode(generated(order)))
        peers[0].answer = reply_to
        assert (await sampled(pool, 1)).key == "r-1"
        assert set(pool._held) == {1}

    drive(body)


@pytest.mark.parametrize("limit_s", [1e9, float("inf")])
def test_so_is_one_whose_answer_has_come_when_its_request_is_cancelled(limit_s: float):
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        task = asyncio.ensure_future(sampled(pool, 0, limit_s=limit_s))
        take = pool.connections._take

        def cancelled_then(link: Any, answer: Any) -> None:
            take(link, answer)
            task.cancel()

        pool.connections._take = cancelled_then  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await peers[0].heard(w.Release) == w.Release(["r-0"])
        assert not pool._held

    drive(body)


def test_what_a_lost_worker_held_and_did_is_told():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        mine, other = await sampled(pool, 0, URLS[0]), await sampled(pool, 1, URLS[1])
        sample = await scored(pool, mine)
        peers[0].answer = lambda order: None
        calls = [
            asyncio.ensure_future(call)
            for call in (sampled(pool, 2, URLS[0]), scored(pool, mine), pool.judge(mine, None, ""))
        ]
        fetched, pending = pool.fetch(sample), asyncio.ensure_future(all_lost(pool))
        await peers[0].heard(w.Fetch)
        peers[0].end()
        generating, scoring, judging = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(generating, ServerUnreachable)
        assert generating.sent
        assert isinstance(scoring, SamplesLost)
        assert isinstance(judging, SamplesLost)
        with pytest.raises(SamplesLost):
            await asyncio.wrap_future(fetched)
        assert await pending == {0}
        assert pool.workers_lost == 1
        assert not pool.holds(sample)
        assert pool.holds(HeldSample(other, None))
        with pytest.raises(SamplesLost):
            pool.source(sample)
        with pytest.raises(SamplesLost):
            await pool.judge(mine, None, "")
        # its server is another's now
        assert (await sampled(pool, 0, URLS[0])).worker == "data worker 1"
        pool.release([0, 1])
        assert await peers[1].heard(w.Release) == w.Release(["r-0", "r-1"])

    drive(body)


def test_a_lost_worker_is_started_again_and_the_run_ends_with_the_last():
    begun: list[int] = []

    def again(index: int) -> bool:
        begun.append(index)
        return len(begun) == 1

    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        await sampled(pool, 0)
        peers[0].end()
        assert await all_lost(pool) == {0}
        waiting = asyncio.ensure_future(sampled(pool, 1))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "there is nobody to ask"
        peers[0] = Peer(pool, 0)
        assert (await waiting).key == "r-1"
        peers[0].end()
        assert await all_lost(pool) == {1}
        with pytest.raises(WorkersLost):
            await pool.lost()
        assert begun == [0, 0]
        assert pool.workers_lost == 2

    drive(body, count=1, again=again)


@pytest.mark.parametrize(
    "keys",
    [None, RankKeys(KEYS.ranks.controller, RunKeys.make().learner), RunKeys.make().ranks],
    ids=["no keys", "a key of its own", "another run's"],
)
def test_a_stranger_is_counted_and_changes_nothing(keys: RankKeys | None):
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        rollout = await sampled(pool, 0)
        stranger = Peer(pool, 1, keys)
        await refused(pool, 1)
        stranger.end()
        assert pool.workers_lost == 0
        assert pool.holds(HeldSample(rollout, None))
        assert stranger.orders == []

    drive(body)


def test_it_is_known_soon_whether_one_of_some_samples_is_lost():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        mine = HeldSample(await sampled(pool, 0, URLS[0]), SHAPE)
        other = HeldSample(await sampled(pool, 1, URLS[1]), SHAPE)
        assert not await pool.loses_one_of([mine, other], 0.01)
        waiting = asyncio.ensure_future(pool.loses_one_of([other, mine], 1e9))
        peers[0].end()
        assert await waiting
        assert await pool.loses_one_of([mine], 1e9), "it is known already"
        assert not await pool.loses_one_of([other], 0.01)

    drive(body)


def test_closing_ends_the_workers():
    async def main() -> None:
        pool = WorkerPool(1, "127.0.0.1", KEYS, 1 << 20)
        pool.connections.open()
        peer = Peer(pool, 0)
        await pool.ready()
        pool.connections.close()
        assert await asyncio.wait_for(peer.heard(w.Close), 30) == w.Close()
        peer.end()

    asyncio.run(main())
