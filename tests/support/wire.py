"""Both ends of the learner's wire for tests: scripted ranks, strangers, one end at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85

from megatron_opd.config.schema import Config
from megatron_opd.learner.channel import ControllerChannel
from megatron_opd.transport import messages as m
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.wire.keys import RankKeys, RunKeys

# the same in every process of a test
KEYS = RunKeys(z85.encode(bytes(range(32))), z85.encode(bytes(range(32, 64))))
Answer = Callable[[m.Request], m.Reply | None]


def config(sections: dict[str, object] | None = None, **learner: object) -> Config:
    return Config.model_validate(
        {
            "data": {"train": "x"},
            "student": {"model": "m"},
            "teacher": {"model": "m"},
            "buffer": {"batch_size": 8},
            "learner": {"timeout_s": 5.0, "dtype": "float32", **learner},
            **(sections or {}),
        }
    )


def hello(rank: int = 0, world: int = 1, **changes: Any) -> m.RankHello:
    """What a healthy rank of a data-parallel world says."""
    facts = {"world": world, "dp": world, "vocab": 512, "dtype": "float32", "data_rank": rank}
    facts |= changes
    info = m.LearnerInfo(
        facts["world"], facts["dp"], 10, facts["vocab"], facts["dtype"], "gloo", "cpu"
    )
    return m.RankHello(rank, facts["data_rank"], info, facts.get("digests", {}))


def connect(context: Any, address: str, keys: RankKeys | None = KEYS.ranks) -> Any:
    """A DEALER socket at `address`; keys None: one without any."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    if keys is not None:
        socket.curve_serverkey, socket.curve_secretkey = keys.controller, keys.secret
        socket.curve_publickey = zmq.curve_public(keys.secret)
    socket.connect(address)
    return socket


class Rank:
    """A scripted learner rank: `answer` makes the reply to a request, or None for silence."""

    def __init__(self, address: str, rank: int, world: int, answer: Answer) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = connect(self.context, address)
        self.rank, self.world, self.answer = rank, world, answer
        self.received: list[tuple[m.Request, list[bytes]]] = []
        self._more = asyncio.Event()

    async def has_heard(self, requests: int) -> None:
        """Wait until it has got so many requests."""
        while len(self.received) < requests:
            self._more.clear()
            await self._more.wait()

    async def run(self) -> None:
        await self.socket.send(m.encode(hello(self.rank, self.world)))
        welcome = m.decode_request((await self.socket.recv_multipart())[0])
        assert isinstance(welcome, m.RankWelcome), welcome
        while True:
            header, *frames = await self.socket.recv_multipart()
            request = m.decode_request(header)
            assert not isinstance(request, m.RankWelcome | m.RankRefused)
            self.received.append((request, frames))
            self._more.set()
            reply = self.answer(request)
            if reply is not None:
                await self.socket.send(m.encode(reply))


def drive(
    body: Callable[[RemoteLearner], Awaitable[None]],
    answers: list[Answer],
    sections: dict[str, object] | None = None,
    heard: int = 0,
    **learner: object,
) -> list[Rank]:
    """Run `body(remote)` against one scripted rank per answer.

    heard: requests that every rank must have got before the connection ends; `body` itself waits
    for rank 0 at most.
    """

    async def main() -> list[Rank]:
        tree = config(sections, parallel={"dp": len(answers)}, **learner)
        remote = RemoteLearner(tree, Admission(KEYS, {}, 512))
        ranks = [Rank(remote.address, r, len(answers), a) for r, a in enumerate(answers)]
        tasks = [asyncio.create_task(rank.run()) for rank in ranks]
        try:
            await body(remote)
            for rank in ranks:
                await rank.has_heard(heard)
        finally:
            remote.close()
            for task in tasks:
                task.cancel()
            for rank in ranks:
                rank.context.destroy(linger=0)
        return ranks

    return asyncio.run(asyncio.wait_for(main(), 30))


@contextmanager
def router(keys: RunKeys = KEYS) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A controller's socket without a controller, which admits the learner of `keys`."""
    import threading

    with zmq.Context() as context:
        zap = context.socket(zmq.REP)
        zap.set(zmq.LINGER, 0)
        zap.bind("inproc://zeromq.zap.01")

        def admit() -> None:
            try:
                while True:
                    version, request, *_, key = zap.recv_multipart()
                    ok = key == z85.decode(keys.admitted["learner"])
                    verdict = [b"200", b"OK"] if ok else [b"400", b"no"]
                    zap.send_multipart([version, request, *verdict, b"", b""])
            except zmq.ZMQError:
                zap.close()

        thread = threading.Thread(target=admit)
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.curve_server, socket.curve_secretkey = True, keys.controller
        socket.zap_domain = b"learner"
        socket.bind("tcp://127.0.0.1:*")
        thread.start()
        try:
            yield socket, socket.get_string(zmq.LAST_ENDPOINT)
        finally:
            socket.close()
            # the thread's recv ends with the context
            context.term()
            thread.join()


def channel(
    address: str, keys: Callable[[], RankKeys | None] = lambda: KEYS.ranks, **rest: Any
) -> ControllerChannel:
    """A rank's end, which tells a lost controller to nobody."""
    options: dict[str, Any] = {"first_s": 5.0, "max_bytes": 2**20, "on_lost": lambda reason: None}
    return ControllerChannel(address, keys, **(options | rest))


def safe(error: Exception) -> None:
    """Assert that it is one line that may be printed."""
    assert str(error).isprintable(), repr(error)
