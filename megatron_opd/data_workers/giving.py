"""Gives samples of a data worker to the learner's ranks, which ask for them by key.

A rank names the keys that its share of a batch has here, and gets every sample as one message: its
key, then its columns (transport/frames.py); the key alone where it is not held. Both ends have the
key pair of the learner's ranks, and speak to nobody else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.transport.samples import Frames
from megatron_opd.wire.codec import BadMessage, Codec
from megatron_opd.wire.gate import Gate, guard_socket
from megatron_opd.wire.keys import RankKeys
from sglang_bridge.refusals import Refusals

logger = logging.getLogger(__name__)

MAX_ASK_BYTES = 16 << 20
"""The largest question of a rank: the keys of its share."""
LINGER_MS = 500
_ASK = Codec[list[str]](list[str], "not a question")


class Giving:
    """Answers ranks on a socket of its own.

    Args:
        context: of the worker's sockets.
        host: what the socket listens on, and how ranks reach it.
        keys: of the ranks.
        frames: returns the columns of the sample of a key, or raises SamplesLost.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        keys: RankKeys,
        frames: Callable[[str], Frames],
    ) -> None:
        self._frames = frames
        self._refusals = Refusals(logger, "on a data worker's socket")
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        guard_socket(self._socket, MAX_ASK_BYTES)
        ranks = {"ranks": zmq.curve_public(keys.secret)}
        self._gate = Gate(context, self._socket, keys.secret, ranks)
        self._socket.bind(f"tcp://{host}:*")
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)

    async def serve(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._gate.answer())
            group.create_task(self._watch())
            while True:
                identity, *frames = await self._socket.recv_multipart(copy=False)
                self._gate.name(identity, identity.bytes)
                self._count_ended()
                await self._give(identity.bytes, [frame.buffer for frame in frames])

    async def _give(self, identity: bytes, question: Sequence[bytes | memoryview]) -> None:
        """Answer one question: the keys of a rank's share, each once, in one frame."""
        try:
            keys = _ASK.decode(question[0]) if len(question) == 1 else None
        except BadMessage:
            keys = None
        if keys is None or len(set(keys)) < len(keys):
            self._refusals.add("a question that cannot be read, or names a key twice")
            return
        for key in keys:
            await self._socket.send_multipart([identity, *self._answer(key)], copy=False)

    def _answer(self, key: str) -> list[bytes | memoryview]:
        try:
            return [key.encode(), *self._frames(key)]
        except SamplesLost:
            return [key.encode()]
        except ValueError as error:
            # a rank that waits must have an answer, and another worker may do better
            logger.warning("%s cannot be given: %s", key, error)
            return [key.encode()]

    async def _watch(self) -> None:
        """Note which connections ended."""
        while True:
            await self._gate.monitor.poll()
            self._gate.look()
            self._count_ended()

    def _count_ended(self) -> None:
        for rank in self._gate.ended():
            if rank is None:
                self._refusals.add("a connection of no rank")

    def close(self) -> None:
        """Close the socket, once what is on its way has been sent (for at most LINGER_MS)."""
        self._gate.close()
        self._socket.close(linger=LINGER_MS)
