"""What data workers and other peers must not say to the controller, and what it costs them."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.controller.snapshot import place
from megatron_opd.controller.snapshot_codec import encode_member
from megatron_opd.data_workers import messages as w
from megatron_opd.data_workers.faults import failed
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.records.types import HeldRollout
from sglang_bridge.errors import ServerUnreachable
from tests.support.data_workers import (
    SHAPE,
    SIZE,
    Peer,
    all_lost,
    drive,
    generated,
    refused,
    reply_to,
    sampled,
    scored,
)
from tests.support.fakes import make_prompt, make_sample
from tests.support.wire import KEYS, connect


def test_what_a_peer_with_keys_must_not_say_is_counted_and_changes_nothing():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        rollout = await sampled(pool, 0)
        second = Peer(pool, 0)  # worker 0 is there
        await refused(pool, 1)
        beyond = Peer(pool, 2)  # there are two
        await refused(pool, 2)
        order = await peers[0].heard(w.Generate)
        await second.socket.send(w.encode(generated(order)))  # an answer of no worker
        await refused(pool, 3)
        await second.socket.send(b"\xc1 garbage")
        await refused(pool, 4)
        await peers[0].socket.send(w.encode(generated(order)))  # a second answer to a call
        await peers[0].socket.send(w.encode(w.JudgedCall(99, 1.0)))  # and one that was never made
        await refused(pool, 6)
        assert await pool.judge(rollout, None, "") == 0.5
        assert (pool.connections.refusals.count, pool.workers_lost) == (6, 0)
        assert second.orders == beyond.orders == []
        second.end()
        beyond.end()
        assert await pool.judge(rollout, None, "") == 0.5
        assert pool.workers_lost == 0

    drive(body)


def test_an_answer_to_a_call_that_was_cancelled_is_no_refusal():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        peers[0].answer = lambda order: None
        task = asyncio.ensure_future(sampled(pool, 0))
        order = await peers[0].heard(w.Generate)
        task.cancel()
        await peers[0].heard(w.Cancel)
        await peers[0].socket.send(w.encode(failed(order.call, asyncio.CancelledError())))
        peers[0].answer = reply_to
        await sampled(pool, 1)
        assert pool.connections.refusals.count == 0
        assert not pool.connections.alive[0].ended

    drive(body)


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1 garbage"],
        [w.encode(w.JudgedCall(1, 0.5))[:-1]],
        [w.encode(w.WorkerHello(0, "tcp://worker:1"))],
        [w.encode(w.WorkerHello(1, "tcp://worker:9"))],
    ],
    ids=["garbage", "truncated", "hello again", "hello as another"],
)
def test_a_worker_that_says_what_it_must_not_is_lost_and_told_to_end(frames: list[bytes]):
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        await sampled(pool, 0)
        await peers[0].socket.send_multipart(frames)
        assert await all_lost(pool) == {0}
        assert await peers[0].heard(w.Close) == w.Close()
        assert (pool.connections.refusals.count, pool.workers_lost) == (1, 1)
        assert [worker.index for worker in pool.connections.alive] == [1]
        # it does not come back by the same connection
        await peers[0].socket.send(w.encode(w.WorkerHello(0, "tcp://worker:1")))
        await refused(pool, 2)
        assert (await sampled(pool, 0)).worker == "data worker 1"
        # the end of its connection is no other peer's
        peers[0].end()
        peers[0] = Peer(pool, 0)
        await pool.ready()
        assert (pool.connections.refusals.count, pool.workers_lost) == (2, 1)

    drive(body, again=lambda index: True)


@pytest.mark.parametrize(
    "answer",
    [
        lambda order: w.JudgedCall(order.call, 0.5),
        lambda order: msgspec.structs.replace(generated(order), tokens=9),
    ],
    ids=["another kind", "more tokens than were asked for"],
)
def test_a_response_that_cannot_be_costs_its_worker_and_is_sampled_by_another(answer: Any):
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        peers[0].answer = answer
        with pytest.raises(ServerUnreachable, match="data worker 0 is lost") as caught:
            await sampled(pool, 0)
        assert caught.value.sent
        assert await peers[0].heard(w.Close) == w.Close()
        assert (await sampled(pool, 0)).worker == "data worker 1"
        assert pool.workers_lost == pool.connections.refusals.count == 1

    drive(body)


@pytest.mark.parametrize("kind", [w.JudgeCall, w.ScoreCall, w.Fetch])
def test_so_does_what_cannot_be_said_of_a_held_response(kind: type[w.Order]):
    wrong: dict[type[w.Order], Callable[[Any], w.Answer]] = {
        w.JudgeCall: lambda order: w.JudgedCall(order.call, 1.5),
        w.ScoreCall: lambda order: w.ScoredCall(order.call, 99, SIZE, SHAPE),
        w.Fetch: lambda order: w.Fetched(order.call, encode_member(place(make_sample(0)))),
    }

    def answer(order: Any) -> w.Answer | None:
        return wrong[kind](order) if isinstance(order, kind) else reply_to(order)

    async def rest(pool: WorkerPool, rollout: HeldRollout) -> None:
        await pool.judge(rollout, None, "")
        await pool.sample(await scored(pool, rollout))

    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        rollout = await sampled(pool, 0)
        peers[0].answer = answer
        with pytest.raises(SamplesLost, match="data worker 0 is lost"):
            await rest(pool, rollout)
        assert await all_lost(pool) == {0}

    drive(body)


@pytest.mark.parametrize("member", [b"", b"\x80", encode_member(place(make_prompt(0)))])
def test_a_member_that_cannot_be_read_or_is_no_response_costs_its_worker(member: bytes):
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        rollout = await sampled(pool, 0)
        peers[0].answer = lambda order: w.Fetched(getattr(order, "call", 0), member)
        with pytest.raises(SamplesLost, match="data worker 0 is lost: "):
            await pool.whole(rollout)

    drive(body)


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "tcp://*:1", "tcp://worker:2"])
def test_a_worker_where_ranks_cannot_or_must_not_connect_does_not_join(address: str):
    async def main() -> None:
        pool = WorkerPool(2, "127.0.0.1", KEYS, 1 << 20)
        pool.connections.open()
        other = Peer(pool, 1)  # at tcp://worker:2
        while not pool.connections.alive:  # noqa: ASYNC110  joining has no event of its own
            await asyncio.sleep(0.01)
        context = zmq.asyncio.Context()
        socket = connect(context, pool.connections.address)
        await socket.send(w.encode(w.WorkerHello(0, address)))
        await refused(pool, 1)
        assert [worker.index for worker in pool.connections.alive] == [1]
        context.destroy(linger=0)
        other.end()
        pool.connections.close()

    asyncio.run(asyncio.wait_for(main(), 60))
