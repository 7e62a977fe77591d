"""Orders and answers cross at any moment: none is taken for another's, none is kept for ever."""

import asyncio
from typing import Any

import numpy as np
import pytest

from megatron_opd.data_workers import messages as w
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.records.types import Rollout
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BadReply, ServerUnreachable
from sglang_bridge.parse import Known
from sglang_bridge.protocol import RolloutRequest
from tests.support.data_workers import (
    ASK,
    SIZE,
    URLS,
    Peer,
    drive,
    reply_to,
    sampled,
)
from tests.support.fakes import make_prompt

NOBODY = "http://127.0.0.1:9"
"""Where no server is, which is known at once."""


def request(rid: str) -> RolloutRequest:
    return RolloutRequest(rid=rid, input_ids=[1], max_new_tokens=8, num_draws=4)


def test_arrays_that_nobody_waits_for_any_more_disturb_nothing():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, why: failures.append(why))
        rollout = await sampled(pool, 0)
        peers[0].answer = lambda order: None
        waiting = pool.whole(rollout)
        order = await peers[0].heard(w.Fetch)
        waiting.cancel()
        peers[0].answer = reply_to
        answer = reply_to(order)
        assert answer is not None
        await peers[0].socket.send(w.encode(answer))
        assert isinstance(await pool.whole(rollout), Rollout)
        assert not any(worker.calls for worker in pool.connections.alive)
        assert failures == []

    drive(body)


def test_a_cancelled_call_is_forgotten():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        peers[0].answer = lambda order: None
        task = asyncio.ensure_future(sampled(pool, 0))
        await peers[0].heard(w.Generate)
        task.cancel()
        await peers[0].heard(w.Release)
        assert not any(worker.calls or worker.outbox for worker in pool.connections.alive)

    drive(body)


@pytest.mark.parametrize("stage", ["sampled", "scored"])
def test_a_call_without_progress_ends_at_its_limit_and_its_worker_is_told(stage: str):
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        rollout = await sampled(pool, 0)
        peers[0].answer = lambda order: None
        async with ServerClient(NOBODY, timeout_s=0.05) as client:
            if stage == "sampled":
                call = pool.generate(client, make_prompt(1), request("r-1"))
            else:
                call = pool.score(client, rollout, ASK, 600)
            with pytest.raises(ServerUnreachable) as error:
                await call
        assert error.value.timed_out
        order = await peers[0].heard(w.Generate if stage == "sampled" else w.ScoreCall)
        assert await peers[0].heard(w.Cancel) == w.Cancel(order.call)

    drive(body, count=1)


@pytest.mark.parametrize("kind", ["", "lost", "no score"])
def test_a_worker_that_cannot_look_does_not_end_the_watch_of_a_server(kind: str):
    """The second look comes all the same, and the request ends at its limit."""

    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        def fails_to_look(order: w.Order) -> w.Answer | None:
            texts = ["teacher_nan", "2"] if kind == "no score" else ["KeyError: 7"]
            return w.CallFailed(order.call, kind, texts, []) if isinstance(order, w.Look) else None

        peers[0].answer = fails_to_look
        with pytest.raises(ServerUnreachable) as error:
            await sampled(pool, 0, limit_s=0.2)
        assert error.value.timed_out
        assert not error.value.stalled, "the server was not heard"
        await peers[0].heard(w.Look, 2)

    drive(body, count=1)


async def sampled_by(pool: WorkerPool, rid: str, known: Known) -> Any:
    """Sample prompt 0 under a name, at a server of which something is known."""
    async with ServerClient(URLS[0], timeout_s=1e9) as client:
        client.know(known)
        return await pool.generate(client, make_prompt(0), request(rid))


def test_weights_that_were_not_synced_are_a_bad_reply_and_what_they_sampled_is_let_go_of():
    """What was synced is checked here, with the reply: the worker may know less by then."""
    spans = [(4, 0, 2), (5, 2, 4)]

    def newer(order: w.Order) -> w.Answer | None:
        if isinstance(order, w.Generate):
            return w.Generated(order.call, 4, 8, SIZE, -0.5, spans, "stop")
        return reply_to(order)

    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        peers[0].answer = newer
        with pytest.raises(BadReply, match="version 5 was not synced yet, 4 was"):
            await sampled_by(pool, "r-0", Known(version=4))
        order = await peers[0].heard(w.Generate)
        assert order.endpoint.known == Known(version=None)
        assert await peers[0].heard(w.Release) == w.Release(["r-0"])
        assert (await sampled_by(pool, "r-1", Known(version=5))).key == "r-1"

    drive(body)


def test_what_an_earlier_try_left_is_let_go_of():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        for rid in ("r-0", "r-1"):
            await sampled_by(pool, rid, Known())
        assert await peers[0].heard(w.Release) == w.Release(["r-0"])
        assert pool._held[0][1] == "r-1"

    drive(body)


def test_servers_are_shared_out_anew_when_a_worker_joins():
    async def body(pool: WorkerPool, peers: list[Peer]) -> None:
        for uid, url in enumerate(URLS):
            await sampled(pool, uid, url)
        peers[0].end()
        await pool.lost()
        owners = {(await sampled(pool, uid, url)).worker for uid, url in enumerate(URLS)}
        assert owners == {"data worker 1"}
        peers[0] = Peer(pool, 0)
        await pool.ready()
        owners_of = [(await sampled(pool, uid, url)).worker for uid, url in enumerate(URLS)]
        assert np.unique(owners_of, return_counts=True)[1].tolist() == [4, 4]

    drive(body, again=lambda index: True)
