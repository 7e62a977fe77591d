"""Real ends of links in one process, with keys made for the tests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from megatron_opd.config.sites import LinkConfig
from megatron_opd.wire.link.ends import LinkClient, LinkServer
from megatron_opd.wire.link.events import Event, Received

PATIENCE_S = 30.0
SERVER_KEYS, SITE_KEYS, OTHER_KEYS = (zmq.curve_keypair() for _ in range(3))
PEERS = {"site": SITE_KEYS[0], "other": OTHER_KEYS[0]}


def link_config(**fields: Any) -> LinkConfig:
    return LinkConfig.model_validate({"heartbeat_s": 0.1, **fields})


@dataclass
class Ends:
    """A server, and clients that are closed with it."""

    config: LinkConfig
    server: LinkServer
    opened: list[LinkClient | LinkServer] = field(default_factory=list)

    def client(
        self, address: str | None = None, keys: tuple[bytes, bytes] = SITE_KEYS, **options: Any
    ) -> LinkClient:
        config = options.pop("config", self.config)
        server_key = options.pop("server_key", SERVER_KEYS[0])
        made = LinkClient(address or self.server.address, keys[1], server_key, config, **options)
        self.opened.append(made)
        return made

    @property
    def port(self) -> int:
        return int(self.server.address.rpartition(":")[2])


def serve(config: LinkConfig, address: str = "tcp://127.0.0.1:*", **options: Any) -> LinkServer:
    return LinkServer(address, SERVER_KEYS[1], PEERS, config, **options)


@contextlib.asynccontextmanager
async def ends(config: LinkConfig | None = None, **options: Any) -> AsyncIterator[Ends]:
    config = config or link_config()
    made = Ends(config, serve(config, **options))
    try:
        yield made
    finally:
        for end in (*made.opened, made.server):
            await end.close()


def drive(body: Callable[[], Awaitable[None]]) -> None:
    """Run a test's body, which must end."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await body()

    asyncio.run(main())


async def event(end: LinkClient | LinkServer, kind: type[Event]) -> Any:
    """The next event of a kind; others are passed over."""
    while True:
        found = await end.next()
        if isinstance(found, kind):
            return found


async def message(end: LinkClient | LinkServer) -> bytes:
    return b"".join((await event(end, Received)).parts)
