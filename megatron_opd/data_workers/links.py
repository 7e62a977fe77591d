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
import zmq.asyncio

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
from megatron_opd.wire.gate import Gate, guard_socket
from megatron_opd.wire.keys import RunKeys
from sglang_bridge.refusals import Refusals

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT", bound=Answer)
LINGER_MS = 500
MORE = zmq.SNDMORE | zmq.NOBLOCK
LOT_S = 0.002
"""Least time between two looks at what came: what came meanwhile is taken together."""


@dataclass(eq=False, slots=True)
class WorkerLink:
    """Holds the connection to one worker.

    address: where learner ranks reach it. calls: those without an answer, by number. outbox: orders
    that are about to be sent. ended: calls that nobody waits for, whose answers may still come.
    """

    index: int
    identity: bytes
    address: str
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict[int, "asyncio.Future[Any]"])
    outbox: list[bytes] = field(default_factory=list[bytes])
    ended: set[int] = field(default_factory=set[int])
    alive: bool = True
    servers: int = 0

    @property
    def name(self) -> str:
        """Returns what messages call the worker."""
        return f"data worker {self.index}"


class Links:
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
        joined: Callable[[WorkerLink], None],
        lost: Callable[[WorkerLink, str], None],
    ) -> None:
        self._count, self._joined, self._lost = count, joined, lost
        self.refusals = Refusals(logger, "on the data workers' socket")
        self._context = zmq.asyncio.Context()
        # not asyncio's: its own descriptor wakes us, and then all messages are taken at once
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        guard_socket(self._socket, max_bytes)
        self._gate = Gate(self._context, self._socket, keys.controller, keys.admitted)
        self._socket.bind(f"tcp://{host}:*")
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._links: dict[bytes, WorkerLink] = {}
        self._next_look_s = 0.0
        self._look: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def alive(self) -> list[WorkerLink]:
        """Returns the workers that are there, in order."""
        return sorted(self._links.values(), key=lambda link: link.index)

    def open(self) -> None:
        """Begin to talk; call inside the event loop."""
        self._tasks = [
            asyncio.create_task(self._gate.answer(), name="data workers' gate"),
            asyncio.create_task(self._watch(), name="data workers"),
        ]
        self._take_lot()

    def close(self) -> None:
        """Tell every worker to end, and close."""
        for link in self.alive:
            self.send(link, Close())
            self._flush(link)
        if self._look is not None:
            self._look.cancel()
        if self._tasks:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        for task in self._tasks:
            task.cancel()
        self._gate.close()
        self._socket.close(linger=LINGER_MS)
        self._context.destroy(linger=LINGER_MS)

    async def call(
        self,
        link: WorkerLink,
        order: Call,
        kind: type[AnswerT],
        fault: Callable[[AnswerT], str | None] | None = None,
    ) -> AnswerT:
        """Send an order and return its answer.

        fault: says what is impossible about an answer. SamplesLost: the worker is lost, meanwhile
        or for its answer.
        """
        answered, number = self.asked(link, order), order.call
        del order  # a prompt, while thousands of answers are awaited
        try:
            answer = await answered
        except asyncio.CancelledError:
            if link.alive and link.calls.pop(number, None) is not None:
                link.ended.add(number)
                self.send(link, Cancel(number))
            raise
        found = self.expected(link, answer, kind)
        why = None if fault is None else fault(found)
        if why is not None:
            raise self.breach(link, f"it answered with {why}")
        return found

    def expected(self, link: WorkerLink, answer: Answer, kind: type[AnswerT]) -> AnswerT:
        """Return an answer of the kind that was asked for. SamplesLost: it is another."""
        if not isinstance(answer, kind):
            raise self.breach(link, f"it answered {type(answer).__name__}, not {kind.__name__}")
        return answer

    def breach(self, link: WorkerLink, why: str) -> SamplesLost:
        """Lose a worker that said what cannot be; return the error of who asked it."""
        if link.alive:
            self.refusals.add(f"{link.name}: {why}")
            self.send(link, Close())
            self._flush(link)
            self._lose(link, why)
        return SamplesLost(f"{link.name} is lost: {why}")

    def asked(self, link: WorkerLink, order: Call) -> asyncio.Future[Answer]:
        """Send an order; its answer comes later."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        link.calls[order.call] = future
        self.send(link, order)
        return future

    def send(self, link: WorkerLink, order: Order) -> None:
        """Send an order, in one message with all others of this turn of the event loop."""
        if not link.outbox:
            asyncio.get_running_loop().call_soon(self._flush, link)
        link.outbox.append(encode(order))

    def _flush(self, link: WorkerLink) -> None:
        frames, link.outbox = link.outbox, []
        if not frames or not link.alive or self._socket.closed:
            return
        try:
            self._socket.send(link.identity, MORE)
            for frame in frames[:-1]:  # send_multipart makes these flags anew for every frame
                self._socket.send(frame, MORE)
            self._socket.send(frames[-1], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(link, str(error))
            return
        # sending may have taken note of what came, of which the descriptor then says nothing
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._something_came()

    def _something_came(self) -> None:
        """Take it, now or together with what comes after."""
        if self._look is None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._descriptor)
            self._look = loop.call_at(self._next_look_s, self._take_lot)

    def _take_lot(self) -> None:
        loop = asyncio.get_running_loop()
        self._look = None
        self._next_look_s = loop.time() + LOT_S
        self._drain()
        loop.add_reader(self._descriptor, self._something_came)

    def _drain(self) -> None:
        """Take all messages that are there."""
        while not self._socket.closed:
            try:
                identity = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if identity in self._links:
                for frame in self._socket.recv_multipart(zmq.NOBLOCK):
                    self._heard(identity, frame)
            else:  # only as an object does a frame tell its connection
                for whole in self._socket.recv_multipart(zmq.NOBLOCK, copy=False):
                    self._heard(identity, whole.bytes, whole)
        # only now: what a worker said before it ended was heard
        for peer in self._gate.ended():
            if peer is None:
                self.refusals.add("a connection of no data worker")
            elif peer in self._links:
                self._lose(self._links[peer], "its connection ended")

    def _heard(self, identity: bytes, frame: bytes, whole: zmq.Frame | None = None) -> None:
        """Process one message of a peer that has the ranks' key. whole: of one that may join."""
        link = self._links.get(identity)
        try:
            answer = decode_answer(frame)
        except BadMessage as error:
            if link is None:
                self.refusals.add(str(error))
            else:
                self.breach(link, str(error))
            return
        if whole is not None and link is None and isinstance(answer, WorkerHello):
            self._join(identity, answer, whole)
        elif link is None:
            self.refusals.add("an answer of no data worker")
        elif isinstance(answer, WorkerHello):
            self.breach(link, "it said hello twice")
        else:
            self._take(link, answer)

    def _join(self, identity: bytes, hello: WorkerHello, whole: zmq.Frame) -> None:
        fault = self._hello_fault(identity, hello)
        if fault is not None:
            self.refusals.add(fault)
            return
        link = self._links[identity] = WorkerLink(hello.index, identity, hello.address)
        self._gate.name(whole, identity)
        self._joined(link)

    def _hello_fault(self, identity: bytes, hello: WorkerHello) -> str | None:
        if self._gate.has_named(identity):
            return "a data worker that is lost"
        alive = self.alive
        if not 0 <= hello.index < self._count or any(hello.index == link.index for link in alive):
            return f"a data worker {hello.index} that is not awaited"
        fault = address_fault(hello.address)
        if fault is None and any(hello.address == link.address for link in alive):
            fault = f"{hello.address} is another's address"
        return fault and f"data worker {hello.index}: {fault}"

    def _take(self, link: WorkerLink, answer: Answered) -> None:
        if answer.call in link.ended:
            link.ended.remove(answer.call)
            return
        future = link.calls.pop(answer.call, None)
        if future is None:
            self.refusals.add(f"{link.name}: an answer to no open call")
            return
        if future.done():
            return
        if isinstance(answer, CallFailed):
            future.set_exception(as_error(answer))
        else:
            future.set_result(answer)

    async def _watch(self) -> None:
        while True:
            await self._gate.monitor.poll()
            self._gate.look()
            self._drain()

    def _lose(self, link: WorkerLink, why: str) -> None:
        if not link.alive:
            return
        link.alive = False
        del self._links[link.identity]
        for future in link.calls.values():
            if not future.done():
                future.set_exception(SamplesLost(f"{link.name} is lost"))
        link.calls.clear()
        self._lost(link, why)
