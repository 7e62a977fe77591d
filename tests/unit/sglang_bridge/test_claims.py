"""A client claims its server, renews that, and knows when it lost it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from aiohttp import web

from megatron_opd.sim.clock import run_virtual
from sglang_bridge import claims, wire
from sglang_bridge.claims import LEASE_S, RENEW_S, Claim, ClaimRefused, ClaimStep, Lease
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerRefused, ServerUnreachable
from sglang_bridge.server.owner import Claims
from tests.support.bridge_replies import FakeServer, answering

URL = "http://h:1"
FIRST, SECOND = (Claim(name, "p", f"run /{name}", True) for name in ("a", "b"))


@dataclass
class Server:
    """A server in virtual time; `lost`: it answers nobody."""

    lost: bool = False
    claims: Claims = field(
        default_factory=lambda: Claims(lambda: asyncio.get_running_loop().time())
    )
    steps: list[str] = field(default_factory=list)

    async def ask(self, body: dict[str, Any], limit_s: float | None) -> None:
        if self.lost:
            raise ServerUnreachable(URL, "/bridge/claim", "reset", sent=True)
        asked = msgspec.convert(body, ClaimStep)
        self.steps.append(asked.step)
        refused = self.claims.refusal(asked.claim, asked.step)
        if refused is not None:
            raise ServerRefused(URL, "/bridge/claim", 409, refused)


def lives(work: Callable[[Server, Lease, Lease], Awaitable[None]]) -> None:
    """Do something with two runs' claims on a server, in virtual time."""

    async def main() -> None:
        server = Server()
        leases = [Lease(URL, server.ask) for _ in range(2)]
        try:
            await work(server, *leases)
        finally:
            for lease in leases:
                await lease.end()

    run_virtual(main())


def test_it_is_held_for_as_long_as_the_run_and_then_released():
    async def work(server: Server, first: Lease, second: Lease) -> None:
        await first.take(FIRST)
        await asyncio.sleep(20 * LEASE_S)
        first.require()
        with pytest.raises(ClaimRefused, match=r"^http://h:1: run /a writes its weights"):
            await second.take(SECOND)
        await first.end()
        await second.take(SECOND)
        assert server.steps.count("renew") >= 20 * LEASE_S / RENEW_S - 1

    lives(work)


def test_that_of_a_killed_run_can_be_taken_and_the_run_if_it_lives_ends():
    async def work(server: Server, first: Lease, second: Lease) -> None:
        await first.take(FIRST)
        server.lost = True  # the network between the first run and the server is cut
        await asyncio.sleep(LEASE_S + 1)
        server.lost = False
        await second.take(SECOND)
        await asyncio.sleep(RENEW_S + 1)
        second.require()
        with pytest.raises(ClaimRefused, match="run /b writes its weights"):
            first.require()
        await first.end()
        assert server.steps[-1] == "renew", "what is another's now is not ended"

    lives(work)


def test_a_server_that_answers_again_is_still_the_run_s():
    async def work(server: Server, first: Lease, second: Lease) -> None:
        await first.take(FIRST)
        server.lost = True
        await asyncio.sleep(RENEW_S * 3)
        server.claims = Claims(lambda: asyncio.get_running_loop().time())  # it was restarted
        server.lost = False
        await asyncio.sleep(RENEW_S)
        first.require()
        with pytest.raises(ClaimRefused):
            await second.take(SECOND)
        server.lost = True
        await first.end()  # and that raises nothing

    lives(work)


def test_another_answer_is_told_as_it_is():
    async def refuses(body: dict[str, Any], limit_s: float | None) -> None:
        raise ServerRefused(URL, "/bridge/claim", 404, "not found")

    async def main() -> None:
        with pytest.raises(ServerRefused, match="404"):
            await Lease(URL, refuses).take(FIRST)

    run_virtual(main())


def test_a_client_whose_claim_is_lost_says_so_when_its_server_is_watched(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(claims, "RENEW_S", 0.01)
    granted = [False, True]  # the last one first

    async def claim(request: web.Request) -> web.Response:
        return web.Response() if granted.pop() else web.Response(status=409, text="run /b has it")

    async def watch(client: ServerClient) -> None:
        while True:
            assert await client.alive()
            await asyncio.sleep(0.01)

    async def main() -> None:
        routes = {wire.CLAIM_ROUTE: claim, "/model_info": answering({})}
        async with FakeServer(routes) as server, ServerClient(server.url, timeout_s=5) as client:
            await client.claim(FIRST)
            with pytest.raises(ClaimRefused, match=r"^http://127.0.0.1:\d+: run /b has it$"):
                await asyncio.wait_for(watch(client), 10)

    asyncio.run(main())
