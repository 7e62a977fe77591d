"""Runs one data worker: executes the controller's orders, and serves samples to learner ranks.

Orders are executed at the same time, each as a task; answers go out as they come, one to each call.
What is no order is counted and changes nothing. The worker ends with its controller, or when that
is out of reach.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from typing import Any

import zmq

from megatron_opd.data.judge import Judge
from megatron_opd.data_workers.data_server import DataServer
from megatron_opd.data_workers.faults import failed
from megatron_opd.data_workers.messages import (
    MAX_ORDER_BYTES,
    Answer,
    Call,
    Cancel,
    Close,
    Fetch,
    Fetched,
    Generate,
    GiveTurn,
    JudgeCall,
    Look,
    NextStep,
    Order,
    Play,
    Release,
    SampleTurn,
    ScoreCall,
    WorkerHello,
    decode_order,
    encode,
)
from megatron_opd.data_workers.store import WorkerStore
from megatron_opd.data_workers.under_way import Playroom
from megatron_opd.wire.codec import BadMessage
from megatron_opd.wire.dealer import Dealer, Disconnected, LostHow
from megatron_opd.wire.keys import RankKeys
from megatron_opd.wire.sockets import PeerMessage, SocketLimits
from sglang_bridge.client import Endpoint, ServerClient
from sglang_bridge.refusals import Refusals

logger = logging.getLogger(__name__)


class ControllerGone(ConnectionError):
    """Reports that the controller's connection ended."""


class Worker:
    """Connects to the controller at `address`.

    Args:
        index: which of the run's workers it is.
        host: where learner ranks reach this worker.
        keys: what a rank of the run has; they make the worker known to all others.
        judge, draws, room: see WorkerStore.
    """

    def __init__(
        self,
        address: str,
        index: int,
        host: str,
        keys: RankKeys,
        judge: Judge | None,
        draws: int,
        room: Playroom | None = None,
    ) -> None:
        self._index = index
        self.refusals = Refusals(logger, "among the controller's orders")
        self._context = zmq.Context()
        limits = SocketLimits(MAX_ORDER_BYTES)
        self._dealer = Dealer(self._context, address, keys.controller, keys.secret, limits)
        self._clients: dict[str, ServerClient] = {}
        self._store = WorkerStore(self._client, judge, draws, room)
        self._data_server = DataServer(host, keys, self._store.frames)
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Execute orders until Close. ControllerGone: the connection to the controller ended."""
        self._send(WorkerHello(self._index, self._data_server.address))
        orders = asyncio.create_task(self._execute_orders(), name="orders")
        samples = asyncio.create_task(self._data_server.serve(), name="samples")
        try:
            done, _ = await asyncio.wait({orders, samples}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            tasks = [orders, samples, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._store.close()
            await asyncio.gather(*(client.close() for client in self._clients.values()))
            self._dealer.close()
            self._data_server.close()
            self._context.term()

    async def _execute_orders(self) -> None:
        """Execute orders until Close. ControllerGone: the connection ended before that."""
        while True:
            match await self._dealer.next():
                case PeerMessage() as message:
                    for frame in message.buffers:
                        try:
                            order = decode_order(frame)
                        except BadMessage as error:
                            self.refusals.add(str(error))
                            continue
                        if not await self._obey(order):
                            return
                case Disconnected(LostHow.ENDED):
                    raise ControllerGone("the controller is gone: this data worker ends")
                case _:
                    pass

    async def _obey(self, order: Order) -> bool:
        """Begin what an order says; returns whether more may follow."""
        match order:
            case Close():
                return False
            case Release():
                for key in order.keys:
                    self._store.release(key)
            case GiveTurn():
                self._store.give(order)
            case Cancel():
                task = self._calls.get(order.call)
                if task is not None:
                    task.cancel()
            case _ if order.call in self._calls:
                self.refusals.add(f"a second call {order.call}")
            case Fetch():
                await self._answer(order)  # now: a release may be the next order
            case _:
                self._begin(order)
                await asyncio.sleep(0)  # so that it has begun, and answers, when it is cancelled
        return True

    def _begin(self, order: Call) -> None:
        task = asyncio.create_task(self._answer(order))
        self._calls[order.call] = task
        task.add_done_callback(lambda _: self._calls.pop(order.call))

    async def _answer(self, order: Call) -> None:
        try:
            answer = await self._execute(order)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  all must be answered
            answer = failed(order.call, error)
        self._send(answer)

    def _execute(self, order: Call) -> Coroutine[Any, Any, Answer]:
        match order:
            case Generate():
                return self._store.generate(order)
            case Play():
                return self._store.play(order)
            case SampleTurn():
                return self._store.sample_turn(order)
            case NextStep():
                return self._store.next_step(order)
            case JudgeCall():
                return self._store.judge(order)
            case ScoreCall():
                return self._store.score(order)
            case Look():
                return self._store.look(order)
            case Fetch():
                return self._fetch(order)

    async def _fetch(self, order: Fetch) -> Fetched:
        return Fetched(order.call, self._store.encoded(order.key))

    def _send(self, answer: Answer) -> None:
        self._dealer.send([encode(answer)])

    def _client(self, endpoint: Endpoint) -> ServerClient:
        """Return the client of a server, made when it is first asked."""
        client = self._clients.get(endpoint.url)
        if client is None:
            # how long a request may make no progress is watched by the controller, which pauses
            client = ServerClient(endpoint.url, timeout_s=math.inf, api_key=endpoint.api_key)
            self._clients[endpoint.url] = client
        if client.known != endpoint.known:
            client.know(endpoint.known)
        return client
