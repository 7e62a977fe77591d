"""Real sockets of data workers that give samples to ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import zmq
import zmq.asyncio

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.data_workers.data_client import DataClient
from megatron_opd.data_workers.data_server import DataServer
from megatron_opd.transport.samples import FRAMES
from megatron_opd.wire.keys import RankKeys
from tests.support.wire import KEYS

LIMIT_S = 60.0
SOON_S = 20.0
"""Far less than LIMIT_S, far more than a busy machine takes to notice."""


def frames_with(*first: bytes) -> list[bytes]:
    """As many frames as a sample has."""
    return [*first, *[b""] * (FRAMES - len(first))]


A = {
    "a-1": frames_with(b"one"),
    "a-2": frames_with(b"two", b"x"),
    "a-3": frames_with(bytes(300_000)),
}
B = {"b-1": frames_with(b"three", b"four")}


class RunningServer:
    """A worker's end towards ranks: what it holds, and which questions came."""

    def __init__(self, held: Mapping[str, Sequence[bytes]]) -> None:
        self.held, self.asked = dict(held), list[str]()
        self.data_server = DataServer("127.0.0.1", KEYS.ranks, self._frames)
        self.task = asyncio.create_task(self.data_server.serve())

    @property
    def address(self) -> str:
        return self.data_server.address

    @property
    def refused(self) -> int:
        return self.data_server._refusals.count

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
        self.data_server.close()


def drive(
    body: Callable[[list[RunningServer]], Awaitable[None]], *held: Mapping[str, Sequence[bytes]]
) -> None:
    """Run `body` beside one worker for each mapping; each has sockets of its own."""

    async def main() -> None:
        servers = [RunningServer(names) for names in held]
        try:
            await asyncio.wait_for(body(servers), 120)
        finally:
            for server in servers:
                await server.end()

    asyncio.run(main())


async def fetch(
    client: DataClient,
    wanted: Mapping[str, Sequence[str]],
    keys: RankKeys = KEYS.ranks,
    silent_s: float = LIMIT_S,
) -> dict[str, list[bytes]]:
    """Take samples, in a thread, as bytes."""
    found = await asyncio.to_thread(client.fetch, wanted, keys, silent_s)
    return {key: list(map(bytes, frames)) for key, frames in found.items()}


def rank_socket(address: str, secret: bytes = KEYS.ranks.secret) -> zmq.asyncio.Socket:
    """A socket of a rank's kind, with a key of its own."""
    socket = zmq.asyncio.Context().socket(zmq.DEALER)
    socket.curve_serverkey = zmq.curve_public(KEYS.ranks.secret)
    socket.curve_secretkey, socket.curve_publickey = secret, zmq.curve_public(secret)
    socket.connect(address)
    return socket
