"""Both ends of a data worker for tests: a scripted one for the controller, a real one for ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq.asyncio

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.controller.snapshot import place
from megatron_opd.controller.snapshot_codec import encode_member
from megatron_opd.sample_figures import CacheSize, ScoreShape
from megatron_opd.transport.keys import RankKeys
from megatron_opd.types import HeldRollout, HeldSample
from megatron_opd.workers import messages as w
from megatron_opd.workers.giving import Giving
from megatron_opd.workers.pool import WorkerPool
from tests.support.fakes import make_sample
from tests.support.wire import KEYS, connect

SIZE, SHAPE = CacheSize(6, 100), ScoreShape(4, -0.5, 0.1, 0)


def generated(order: w.Generate) -> w.Generated:
    return w.Generated(order.call, 4, 8, SIZE, -0.5, [(3, 0, 4)], "stop")


def reply_to(order: w.Order) -> w.Answer | None:
    """What a healthy worker says."""
    match order:
        case w.Generate():
            return generated(order)
        case w.Judge():
            return w.Judged(order.call, 0.5)
        case w.Score():
            return w.Scored(order.call, 9, SIZE, SHAPE)
        case w.Fetch():
            return w.Whole(order.call, encode_member(place(make_sample(0))))
        case _:
            return None


def held(uid: int) -> HeldSample:
    """A sample that a worker holds, and no teacher has scored."""
    whole = make_sample(uid).rollout
    return HeldSample(
        HeldRollout(
            *(whole.prompt, "data worker 0", f"k-{uid}", 4, 8, CacheSize(6, 100), -0.5),
            *(whole.spans, "stop", 0.0, 1.0),
        ),
        None,
    )


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
        self.socket = connect(self.context, pool.links.address, keys)
        self.index, self.address = index, address or f"tcp://worker:{index}"
        self.answer: Callable[[w.Order], w.Answer | None] = reply_to
        self.orders: list[w.Order] = []
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self.socket.send(w.encode(w.Hello(self.index, self.address)))
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


class Given:
    """A worker's end towards ranks: what it holds, and which questions came."""

    def __init__(self, context: zmq.asyncio.Context, held: Mapping[str, Sequence[bytes]]) -> None:
        self.held, self.asked = dict(held), list[str]()
        self.giving = Giving(context, "127.0.0.1", KEYS.ranks, self._frames)
        self.task = asyncio.create_task(self.giving.serve())

    @property
    def address(self) -> str:
        return self.giving.address

    @property
    def refused(self) -> int:
        return self.giving._refusals.count

    def _frames(self, key: str) -> list[bytes]:
        self.asked.append(key)
        if key == "malformed":
            raise ValueError("rows do not fit")
        if key not in self.held:
            raise SamplesLost(key)
        return list(self.held[key])

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.giving.close()
