"""Serves samples of a data worker to the learner's ranks, which ask for them by key.

A rank names the keys that its share of a batch has here, and gets every sample as one message: its
key, then its columns (transport/frames.py); the key alone where it is not held. Both ends have the
key pair of the learner's ranks, and speak to nobody else.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import zmq

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.transport.samples import Frames
from megatron_opd.wire.codec import BadMessage, Codec
from megatron_opd.wire.keys import RankKeys
from megatron_opd.wire.router import PeerGone, Router, StrangerGone
from megatron_opd.wire.sockets import Buffer, PeerMessage, SocketLimits
from sglang_bridge.refusals import Refusals

logger = logging.getLogger(__name__)

MAX_ASK_BYTES = 16 << 20
"""The largest question of a rank: the keys of its share."""
ASKS_WAITING = 1000
"""Questions of a rank that wait for this process; then TCP holds the rank up."""
LINGER_MS = 500
_ASK = Codec[list[str]](list[str], "not a question")


class DataServer:
    """Answers ranks on a socket of its own.

    Args:
        host: what the socket listens on, and how ranks reach it.
        keys: of the ranks.
        frames: returns the columns of the sample of a key, or raises SamplesLost.
    """

    def __init__(self, host: str, keys: RankKeys, frames: Callable[[str], Frames]) -> None:
        self._frames = frames
        self._refusals = Refusals(logger, "on a data worker's socket")
        ranks = {"ranks": zmq.curve_public(keys.secret)}
        limits = SocketLimits(MAX_ASK_BYTES, waiting_in=ASKS_WAITING)
        self._router = Router(f"tcp://{host}:*", keys.secret, ranks, limits)
        self.address = self._router.address

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            match await self._router.next():
                case PeerMessage() as message:
                    self._serve_share(message.route, message.buffers)
                case StrangerGone():
                    self._refusals.add("a connection of no rank")
                case PeerGone():
                    pass

    def _serve_share(self, route: bytes, question: Sequence[Buffer]) -> None:
        """Answer one question: the keys of a rank's share, each once, in one frame."""
        try:
            keys = _ASK.decode(question[0]) if len(question) == 1 else None
        except BadMessage:
            keys = None
        if keys is None or len(set(keys)) < len(keys):
            self._refusals.add("a question that cannot be read, or names a key twice")
            return
        with contextlib.suppress(zmq.ZMQError):  # it has left: nobody waits for the rest
            for key in keys:
                self._router.send(route, self._answer(key))

    def _answer(self, key: str) -> list[Buffer]:
        try:
            return [key.encode(), *self._frames(key)]
        except SamplesLost:
            return [key.encode()]
        except ValueError as error:
            # a rank that waits must have an answer, and another worker may do better
            logger.warning("%s cannot be given: %s", key, error)
            return [key.encode()]

    def close(self) -> None:
        """Close the socket, once what is on its way has been sent (for at most LINGER_MS)."""
        self._router.close(LINGER_MS)
