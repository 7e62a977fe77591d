"""A real server's requests are given the time that they need, and no more."""

import asyncio
import signal

import psutil
import pytest

from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.replies import requests_of

pytestmark = pytest.mark.e2e
LIMIT_S = 3.0
TOKENS, REQUESTS, AT_ONCE = 300, 48, 32


def test_growth_queues_and_pauses_take_longer_than_the_limit(student_server: ServerProcess):
    async def run() -> None:
        clock = asyncio.get_running_loop().time
        async with ServerClient(student_server.spec.url, timeout_s=LIMIT_S) as client:
            began_s = clock()
            work = [
                asyncio.ensure_future(client.generate(request))
                for request in requests_of(TOKENS, REQUESTS)
            ]
            while not (found := await client.progress()).waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert 0 < len(found.tokens) <= AT_ONCE
            assert all(0 <= count < TOKENS for count in found.tokens.values())
            await client.pause()
            retracted = await client.progress()
            assert not retracted.tokens, "a retracted request waits"
            await asyncio.sleep(1.5 * LIMIT_S)
            # some may have been complete before the pause (an end can be sampled at once), and
            # some may have reached the scheduler after it
            assert AT_ONCE <= len(retracted.waiting) <= sum(not task.done() for task in work)
            await client.resume()
            replies = await asyncio.gather(*work)
            assert all(0 < len(reply.output_ids_T) <= TOKENS for reply in replies)
            assert clock() - began_s > 2 * LIMIT_S

    asyncio.run(run())


def test_a_scheduler_that_hangs_is_noticed_though_the_server_is_alive(
    student_server: ServerProcess,
):
    request, another = requests_of(8, 2)
    assert student_server.pid is not None
    (scheduler,) = [
        child
        for child in psutil.Process(student_server.pid).children(recursive=True)
        if "scheduler" in " ".join(child.cmdline() or [child.name()])
    ]

    async def run() -> None:
        async with ServerClient(student_server.spec.url, timeout_s=LIMIT_S) as client:
            scheduler.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(ServerUnreachable, match="no progress for 3 s") as caught:
                    await client.generate(request)
                assert caught.value.timed_out
                assert not caught.value.stalled
                assert await client.alive()
            finally:
                scheduler.send_signal(signal.SIGCONT)
            assert len((await client.generate(another)).output_ids_T) > 0

    asyncio.run(run())
