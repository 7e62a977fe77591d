"""Scripted data workers beside a real pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import zmq.asyncio

from megatron_opd.controller.snapshot import place
from megatron_opd.controller.snapshot_codec import encode_member
from megatron_opd.data_workers import messages as w
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.records.sample_figures import CacheSize
from megatron_opd.records.types import HeldRollout, HeldSample
from megatron_opd.rollout.score_requests import TeacherAsk
from megatron_opd.wire.keys import RankKeys
from sglang_bridge.client import ServerClient
from sglang_bridge.protocol import RolloutRequest
from tests.support.fakes import held_rollout, make_prompt, make_sample
from tests.support.wire import KEYS, connect

SAMPLE = make_sample(0, version=3)
"""What every worker holds, whatever it was asked."""
SIZE, SHAPE = SAMPLE.cache, SAMPLE.scores(600)
assert SHAPE is not None
ASK = TeacherAsk("score-0", 1.0, 0, 4, 7, 512)
URLS = [f"http://host:{port}" for port in range(1, 9)]


def generated(order: w.Generate) -> w.Generated:
    mean = SAMPLE.rollout.geometric_logps[0]
    return w.Generated(order.call, 4, 8, SIZE, mean, [(3, 0, 4)], "stop")


def reply_to(order: w.Order) -> w.Answer | None:
    """What a healthy worker says."""
    match order:
        case w.Generate():
            return generated(order)
        case w.JudgeCall():
            return w.JudgedCall(order.call, 0.5)
        case w.ScoreCall():
            return w.ScoredCall(order.call, 8, SIZE, SHAPE)
        case w.Fetch():
            return w.Fetched(order.call, encode_member(place(SAMPLE)))
        case _:
            return None


def held(uid: int) -> HeldSample:
    """A sample that a worker holds, and no teacher has scored."""
    whole = make_sample(uid).rollout
    return HeldSample(held_rollout(whole, f"k-{uid}", CacheSize(6, 100)), None)


class Peer:
    """A worker's end towards the controller, scripted. address: where it says ranks reach it."""

    def __init__(
        self,
        pool: WorkerPool,
        index: int,
        keys: RankKeys | None = KEYS.ranks,
        address: str | None = None,
    ) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = connect(self.context, pool.connections.address, keys)
        self.index, self.address = index, address or f"tcp://worker:{index + 1}"
        self.answer: Callable[[w.Order], w.Answer | None] = reply_to
        self.orders: list[w.Order] = []
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self.socket.send(w.encode(w.WorkerHello(self.index, self.address)))
        while True:
            order = w.decode_order(await self.socket.recv())
            self.orders.append(order)
            self._more.set()
            answer = self.answer(order)
            if answer is not None:
                await self.socket.send(w.encode(answer))

    async def heard(self, kind: type[w.Order], count: int = 1) -> Any:
        """Wait for an order of a kind; return the last."""
        while len(found := [order for order in self.orders if isinstance(order, kind)]) < count:
            self._more.clear()
            await self._more.wait()
        return found[-1]

    def end(self) -> None:
        self.task.cancel()
        self.context.destroy(linger=0)


Body = Callable[[WorkerPool, list[Peer]], Awaitable[None]]


def drive(body: Body, count: int = 2, again: Callable[[int], bool] | None = None) -> None:
    """Run `body` beside a pool and so many workers, which have joined it."""

    async def main() -> None:
        pool = WorkerPool(count, "127.0.0.1", KEYS, 1 << 20, again)
        pool.connections.open()
        peers = [Peer(pool, index) for index in range(count)]
        try:
            async with asyncio.timeout(60):
                await pool.ready()
                await body(pool, peers)
        finally:
            for peer in peers:
                peer.end()
            pool.connections.close()

    asyncio.run(main())


async def sampled(pool: WorkerPool, uid: int, url: str = URLS[0], limit_s: float = 1e9) -> Any:
    """Let the server at `url` sample a prompt."""
    request = RolloutRequest(
        rid=f"r-{uid}", input_ids=[1, 2, 3], max_new_tokens=8, num_draws=4, seed=uid
    )
    client = ServerClient(url, timeout_s=limit_s)
    try:
        return await pool.generate(client, make_prompt(uid), request)
    finally:
        await client.close()


async def scored(pool: WorkerPool, rollout: HeldRollout) -> HeldSample:
    """Let another server score a response."""
    async with ServerClient(URLS[1], timeout_s=1e9) as client:
        return HeldSample(*await pool.score(client, rollout, ASK, 600), 0.5)


async def all_lost(pool: WorkerPool) -> set[int]:
    """The prompts whose arrays were lost."""
    return set(await pool.lost())


async def refused(pool: WorkerPool, count: int) -> None:
    """Wait until so many messages and connections were refused."""
    while pool.connections.refusals.count < count:  # noqa: ASYNC110  a count has no event
        await asyncio.sleep(0.01)
