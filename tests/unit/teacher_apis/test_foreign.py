"""A server of somebody else that is busy, silent or wrong: waited for, given up, never hung on."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

import pytest

from megatron_opd.sim.clock import run_virtual
from megatron_opd.teacher_apis.openai import OpenaiClient
from megatron_opd.teacher_apis.sglang import SglangClient
from sglang_bridge import retry
from sglang_bridge.errors import BridgeError, ServerRefused, ServerUnreachable
from sglang_bridge.fleet import Fleet
from sglang_bridge.retry import Backoff, retried
from tests.support.foreign_server import MODEL, ForeignServer, busy, score_request, silent

Result = TypeVar("Result")


def with_client(
    server: ForeignServer, ask: Callable[[SglangClient], Awaitable[Result]], timeout_s: float = 20
) -> Result:
    async def run() -> Result:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(server.up())
            client = SglangClient(server.url, timeout_s=timeout_s, api_key="sesame")
            return await ask(await stack.enter_async_context(client))

    return asyncio.run(run())


def test_a_busy_server_is_asked_again_when_it_says_and_no_try_is_lost():
    server = ForeignServer("sglang", [lambda: busy(429, Retry_After="0")] * 5)

    async def ask(client: SglangClient) -> object:
        return await retried(lambda _: client.score(score_request()), Backoff(1, 0.01))

    assert with_client(server, ask)
    assert len(server.asked) == 6


def test_a_busy_server_that_says_nothing_costs_a_try():
    server = ForeignServer("sglang", [lambda: busy(503)] * 5)

    async def ask(client: SglangClient) -> object:
        return await retried(lambda _: client.score(score_request()), Backoff(3, 0.01))

    with pytest.raises(ServerRefused, match="503: slow down"):
        with_client(server, ask)
    assert len(server.asked) == 3


def test_nobody_asks_a_busy_server_before_it_said():
    """Two requests: the second one is held back by what the first one was told."""
    server = ForeignServer("sglang", [lambda: busy(429, Retry_After="1")])

    async def ask(client: SglangClient) -> float:
        with pytest.raises(ServerRefused, match="429"):
            await client.score(score_request())
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await client.score(score_request())
        return clock() - began_s

    assert with_client(server, ask) >= 0.9


def test_one_that_is_busy_for_hours_is_not_waited_for():
    server = ForeignServer("sglang", [lambda: busy(429, Retry_After="7200")])

    async def ask(client: SglangClient) -> None:
        for said in ("429: slow down", "too busy for another 7"):
            with pytest.raises(ServerRefused, match=said):
                await retried(lambda _: client.score(score_request()), Backoff(5, 0.01))

    with_client(server, ask)
    assert len(server.asked) == 1


def test_waits_for_a_busy_server_have_a_bound():
    """On a virtual clock: each answer asks for 100 s more."""

    async def run() -> tuple[int, float]:
        tries, loop = 0, asyncio.get_running_loop()

        async def call(earlier: int) -> None:
            nonlocal tries
            tries += 1
            raise ServerRefused("http://a", "/x", 429, "busy", 100.0)

        began_s = loop.time()
        with pytest.raises(ServerRefused):
            await retried(call, Backoff(2))
        return tries, loop.time() - began_s

    tries, seconds = run_virtual(run())
    assert (tries, seconds) == (7, retry.BUSY_S)


def test_a_server_that_never_answers_times_out_and_is_given_up():
    server = ForeignServer("sglang", [silent] * 9)

    async def ask(client: SglangClient) -> BaseException:
        fleet = Fleet([client])
        hung = asyncio.create_task(fleet.hung(client.url))
        with pytest.raises(ServerUnreachable) as found:
            await fleet.score(score_request())
        await asyncio.wait_for(hung, 20)  # the supervisor retires it, as any server that is silent
        assert found.value.timed_out
        return found.value

    with_client(server, ask, timeout_s=0.3)


def test_a_busy_server_is_alive_and_one_that_fails_is_not():
    async def ask(client: SglangClient) -> bool:
        return await client.alive()

    server = ForeignServer("sglang")
    assert with_client(server, ask)

    async def elsewhere() -> None:
        client = SglangClient(server.url, timeout_s=5)  # it is down by now
        with pytest.raises(ServerUnreachable):
            await client.alive()
        await client.close()

    asyncio.run(elsewhere())


def test_it_is_told_its_key_and_the_name_of_its_model():
    async def ask(server: ForeignServer, name: str | None) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(server.up())
            client = OpenaiClient(server.url, timeout_s=5, api_key="sesame", name=name)
            await stack.enter_async_context(client)
            info = await client.info()
            assert (info.version, info.context_length) == (0, 64)
            await client.score(score_request())

    server = ForeignServer("vllm")
    asyncio.run(ask(server, None))
    assert server.keys == {"Bearer sesame"}
    assert server.asked[0]["model"] == MODEL
    several = ForeignServer("vllm", models=("a", "b"))
    with pytest.raises(ServerRefused, match=r"needs served_name, one of .*: a, b"):
        asyncio.run(ask(several, None))
    with pytest.raises(ServerRefused, match="needs served_name"):
        asyncio.run(ask(several, "c"))
    asyncio.run(ask(several, "b"))
    assert several.asked[0]["model"] == "b"


def test_it_is_asked_nothing_that_only_the_plugin_knows():
    server = ForeignServer("sglang")

    async def ask(client: SglangClient) -> None:
        for question in (client.progress, client.work):
            with pytest.raises(BridgeError, match="does not tell"):
                await question()
        await client.abort("r")
        assert await client.has_started()
        assert await client.version() == 0

    with_client(server, ask)
    assert server.asked == []
