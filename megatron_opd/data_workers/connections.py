"""Keeps the connections to the run's data workers: who is there, what was asked, who is lost.

Invariant: what comes is the answer to an open call of its worker, or it changes nothing but the
count of refusals, or it is a breach, with which the worker is lost and told to end.

Orders of one turn of the event loop travel in one message: at many samples a second a message costs
more than what is in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.data_workers.checks import address_fault
from megatron_opd.data_workers.faults import as_error
from megatron_opd.data_workers.messages import (
    Answer,
    Answered,
    Call,
    CallFailed,
    Cancel,
    Close,
    Order,
    WorkerHello,
    decode_answer,
    encode,
)
from megatron_opd.wire.codec import BadMessage
from megatron_opd.wire.keys import RunKeys
from megatron_opd.wire.router import PeerGone, Router, StrangerGone
from megatron_opd.wire.sockets import PeerMessage, SocketLimits
from sglang_bridge.refusals import Refusals

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT", bound=Answer)
LINGER_MS = 500
TOGETHER_S = 0.002
"""Least time between two looks at what came: what came meanwhile is taken together."""


@dataclass(eq=False, slots=True)
class WorkerConnection:
    """Holds the connection to one worker.

    route: names it to the socket. address: where learner ranks reach it. calls: those without an
    answer, by number. outbox: orders that are about to be sent. ended: calls that nobody waits for,
    whose answers may still come. servers: that it asks. trajectories: that it plays.
    """

    index: int
    route: bytes
    address: str
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict[int, "asyncio.Future[Any]"])
    outbox: list[bytes] = field(default_factory=list[bytes])
    ended: set[int] = field(default_factory=set[int])
    alive: bool = True
    servers: int = 0
    trajectories: int = 0

    @property
    def name(self) -> str:
        """Returns what messages call the worker."""
        return f"data worker {self.index}"


class WorkerConnections:
    """Binds at once; workers connect to `address`.

    Args:
        count: how many workers there are to be.
        host: what it listens on.
        keys: the run's.
        max_bytes: the largest answer, that of a whole sample.
        joined: called with a worker that is there.
        lost: called with a worker that is not there any more, and why.
    """

    def __init__(
        self,
        count: int,
        host: str,
        keys: RunKeys,
        max_bytes: int,
        joined: Callable[[WorkerConnection], None],
        lost: Callable[[WorkerConnection, str], None],
    ) -> None:
        self._count, self._joined, self._lost = count, joined, lost
        self.refusals = Refusals(logger, "on the data workers' socket")
        self._router = Router(
            f"tcp://{host}:*",
            keys.controller,
            keys.admitted,
            SocketLimits(max_bytes),
            together_s=TOGETHER_S,
        )
        self.address = self._router.address
        self._connections: dict[bytes, WorkerConnection] = {}
        self._former: set[bytes] = set()
        """Routes of lost workers whose connections have not ended yet."""
        self._task: asyncio.Task[None] | None = None

    @property
    def alive(self) -> list[WorkerConnection]:
        """Returns the workers that are there, in order."""
        return sorted(self._connections.values(), key=lambda worker: worker.index)

    def is_there(self, index: int) -> bool:
        """Return whether the worker of an index is there."""
        return any(worker.index == index for worker in self._connections.values())

    def open(self) -> None:
        """Begin to talk; call inside the event loop."""
        self._task = asyncio.create_task(self._hear(), name="data workers")

    def close(self) -> None:
        """Tell every worker to end, and close."""
        for worker in self.alive:
            self.send(worker, Close())
            self._flush(worker)
        if self._task is not None:
            self._task.cancel()
        self._router.close(LINGER_MS)

    async def call(
        self,
        worker: WorkerConnection,
        order: Call,
        kind: type[AnswerT],
        fault: Callable[[AnswerT], str | None] | None = None,
    ) -> AnswerT:
        """Send an order and return its answer.

        fault: says what is impossible about an answer. SamplesLost: the worker is lost, meanwhile
        or for its answer.
        """
        answered, number = self.asked(worker, order), order.call
        del order  # a prompt, while thousands of answers are awaited
        try:
            answer = await answered
        except asyncio.CancelledError:
            if worker.alive and worker.calls.pop(number, None) is not None:
                worker.ended.add(number)
                self.send(worker, Cancel(number))
            raise
        found = self.expected(worker, answer, kind)
        why = None if fault is None else fault(found)
        if why is not None:
            raise self.breach(worker, f"it answered with {why}")
        return found

    def expected(self, worker: WorkerConnection, answer: Answer, kind: type[AnswerT]) -> AnswerT:
        """Return an answer of the kind that was asked for. SamplesLost: it is another."""
        if not isinstance(answer, kind):
            raise self.breach(worker, f"it answered {type(answer).__name__}, not {kind.__name__}")
        return answer

    def breach(self, worker: WorkerConnection, why: str) -> SamplesLost:
        """Lose a worker that said what cannot be; return the error of who asked it."""
        if worker.alive:
            self.refusals.add(f"{worker.name}: {why}")
            self.send(worker, Close())
            self._flush(worker)
            self._lose(worker, why)
        return SamplesLost(f"{worker.name} is lost: {why}")

    def asked(self, worker: WorkerConnection, order: Call) -> asyncio.Future[Answer]:
        """Send an order; its answer comes later."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        worker.calls[order.call] = future
        self.send(worker, order)
        return future

    def send(self, worker: WorkerConnection, order: Order) -> None:
        """Send an order, in one message with all others of this turn of the event loop."""
        if not worker.outbox:
            asyncio.get_running_loop().call_soon(self._flush, worker)
        worker.outbox.append(encode(order))

    def _flush(self, worker: WorkerConnection) -> None:
        frames, worker.outbox = worker.outbox, []
        if not frames or not worker.alive or self._router.closed:
            return
        try:
            self._router.send(worker.route, frames)
        except zmq.ZMQError as error:
            self._lose(worker, str(error))

    async def _hear(self) -> None:
        while True:
            match await self._router.next():
                case PeerMessage() as message:
                    for frame in message.buffers:
                        self._heard(message.route, frame)
                case PeerGone(route) if route in self._connections:
                    self._lose(self._connections[route], "its connection ended")
                    self._former.discard(route)
                case PeerGone(route) if route in self._former:
                    self._former.remove(route)
                case PeerGone() | StrangerGone():
                    self.refusals.add("a connection of no data worker")

    def _heard(self, route: bytes, frame: memoryview) -> None:
        """Process one frame of a peer that has the ranks' key."""
        worker = self._connections.get(route)
        try:
            answer = decode_answer(frame)
        except BadMessage as error:
            if worker is None:
                self.refusals.add(str(error))
            else:
                self.breach(worker, str(error))
            return
        if worker is None and isinstance(answer, WorkerHello):
            self._join(route, answer)
        elif worker is None:
            self.refusals.add("an answer of no data worker")
        elif isinstance(answer, WorkerHello):
            self.breach(worker, "it said hello twice")
        else:
            self._take(worker, answer)

    def _join(self, route: bytes, hello: WorkerHello) -> None:
        fault = self._hello_fault(route, hello)
        if fault is not None:
            self.refusals.add(fault)
            return
        worker = self._connections[route] = WorkerConnection(hello.index, route, hello.address)
        self._joined(worker)

    def _hello_fault(self, route: bytes, hello: WorkerHello) -> str | None:
        if route in self._former:
            return "a data worker that is lost"
        if not 0 <= hello.index < self._count or self.is_there(hello.index):
            return f"a data worker {hello.index} that is not awaited"
        fault = address_fault(hello.address)
        if fault is None and any(hello.address == worker.address for worker in self.alive):
            fault = f"{hello.address} is another's address"
        return fault and f"data worker {hello.index}: {fault}"

    def _take(self, worker: WorkerConnection, answer: Answered) -> None:
        if answer.call in worker.ended:
            worker.ended.remove(answer.call)
            return
        future = worker.calls.pop(answer.call, None)
        if future is None:
            self.refusals.add(f"{worker.name}: an answer to no open call")
            return
        if future.done():
            return
        if isinstance(answer, CallFailed):
            future.set_exception(as_error(answer))
        else:
            future.set_result(answer)

    def _lose(self, worker: WorkerConnection, why: str) -> None:
        if not worker.alive:
            return
        worker.alive = False
        del self._connections[worker.route]
        self._former.add(worker.route)
        for future in worker.calls.values():
            if not future.done():
                future.set_exception(SamplesLost(f"{worker.name} is lost"))
        worker.calls.clear()
        self._lost(worker, why)
