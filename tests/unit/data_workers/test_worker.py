"""A whole data worker beside the controller's end: orders, their order, and how it ends."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.data.end_tokens import Ending
from megatron_opd.data_workers.data_client import DataClient
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.data_workers.worker import ControllerGone, Worker
from megatron_opd.records.types import HeldSample, Prompt, Rollout, Sample
from megatron_opd.rollout.score_requests import TeacherAsk
from sglang_bridge.client import Endpoint, ServerClient
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.parse import NOTHING_KNOWN, Known
from sglang_bridge.protocol import Progress, RolloutRequest
from tests.support.answering import SCORES_N, Server
from tests.support.cutting_proxy import CuttingProxy
from tests.support.fakes import make_prompt
from tests.support.wire import KEYS

URL = "http://host:1"
ASK = TeacherAsk("score-0", 1.0, 0, 0, 7, 512)


class Verifier:
    async def reward(self, prompt: Prompt, response_ids: list[int], ending: Ending) -> float:
        return 0.25


class Ends:
    """A worker and the pool that it belongs to; its servers all are `server`."""

    def __init__(self, pool: WorkerPool, address: str, server: Server) -> None:
        verifier: Any = Verifier()
        clients: Any = lambda endpoint: server  # noqa: E731
        self.pool, self.server = pool, server
        self.worker = Worker(address, 0, "127.0.0.1", KEYS.ranks, verifier, 4)
        self.worker._store._clients = clients
        self.running = asyncio.create_task(self.worker.run())

    @property
    def num_held(self) -> int:
        return len(self.worker._store)

    async def sample(self, uid: int = 0, limit_s: float = 1e9) -> Any:
        request = RolloutRequest(
            rid=f"r-{uid}", input_ids=[0, 1, 2], max_new_tokens=8, num_draws=4, seed=uid
        )
        async with ServerClient(URL, timeout_s=limit_s) as client:
            return await self.pool.generate(client, make_prompt(uid), request)


def drive(body: Callable[[Ends], Awaitable[None]], server: Server | None = None) -> None:
    """Run `body` beside both ends, which are connected."""

    async def main() -> None:
        pool = WorkerPool(1, "127.0.0.1", KEYS, 1 << 20)
        pool.connections.open()
        ends = Ends(pool, pool.connections.address, server or Server())
        try:
            async with asyncio.timeout(60):
                await pool.ready()
                await body(ends)
        finally:
            pool.connections.close()
            await asyncio.wait_for(ends.running, 30)  # which was told to end

    asyncio.run(main())


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110  what is counted has no event
        await asyncio.sleep(0.001)


def test_a_sample_passes_all_stages_and_is_let_go_of():
    async def body(ends: Ends) -> None:
        rollout = await ends.sample()
        assert await ends.pool.judge(rollout, None, "42") == 0.25
        async with ServerClient(URL, timeout_s=1e9) as teacher:
            held = HeldSample(*await ends.pool.score(teacher, rollout, ASK, 512))
        whole = await ends.pool.sample(held)
        assert isinstance(whole, Sample)
        assert np.array_equal(whole.teacher_logp_N, SCORES_N)
        address, key = ends.pool.source(held)
        client = DataClient(1 << 20)
        try:
            taken = await asyncio.to_thread(client.fetch, {address: [key]}, KEYS.ranks, 60)
        finally:
            client.close()
        assert taken.keys() == {key}
        ends.pool.release([0])
        await until(lambda: ends.num_held == 0)
        assert not ends.worker._calls

    drive(body)


def test_orders_are_executed_at_the_same_time():
    async def body(ends: Ends) -> None:
        ends.server.until.clear()
        samples = [asyncio.ensure_future(ends.sample(uid)) for uid in range(3)]
        await until(lambda: len(ends.server.asked) == 3)
        ends.server.until.set()
        assert [sample.key for sample in await asyncio.gather(*samples)] == ["r-0", "r-1", "r-2"]

    drive(body)


def test_a_request_that_nobody_waits_for_ends_at_its_server_and_keeps_nothing():
    async def body(ends: Ends) -> None:
        ends.server.until.clear()
        sampling = asyncio.ensure_future(ends.sample())
        await until(lambda: len(ends.server.asked) == 1)
        sampling.cancel()
        await until(lambda: ends.server.cancelled == 1)
        ends.server.until.set()
        await ends.sample(1)
        assert ends.num_held == 1
        assert not ends.worker._calls

    drive(body)


def test_arrays_that_were_asked_for_come_although_they_are_let_go_of_next():
    async def body(ends: Ends) -> None:
        rollout = await ends.sample()
        arrays = ends.pool.whole(rollout)
        ends.pool.release([0])
        assert isinstance(await arrays, Rollout)
        with pytest.raises(SamplesLost):
            await ends.pool.whole(rollout)
        assert ends.num_held == 0

    drive(body)


def test_an_error_of_a_server_arrives():
    async def body(ends: Ends) -> None:
        with pytest.raises(ServerUnreachable, match="reset"):
            await ends.sample()
        assert not ends.worker._calls

    drive(body, Server(ServerUnreachable(URL, "/generate", "reset", sent=True)))


def test_a_server_has_one_client_which_knows_what_the_controller_knows():
    async def main() -> None:
        async with CuttingProxy("tcp://127.0.0.1:9") as nobody:
            worker = Worker(nobody.address, 0, "127.0.0.1", KEYS.ranks, None, 4)
            first = worker._client(Endpoint(URL, "key", NOTHING_KNOWN))
            known = Known(vocab_size=7)
            endpoint = Endpoint(URL, "key", known)
            assert worker._client(endpoint) is first
            assert first.endpoint == endpoint
            running = asyncio.create_task(worker.run())
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(main())


def test_a_worker_whose_controller_is_gone_ends():
    async def main() -> None:
        pool = WorkerPool(1, "127.0.0.1", KEYS, 1 << 20)
        pool.connections.open()
        async with CuttingProxy(pool.connections.address) as proxy:
            server = Server()
            ends = Ends(pool, proxy.address, server)
            async with asyncio.timeout(60):
                await pool.ready()
                server.until.clear()
                sampling = asyncio.ensure_future(ends.sample())
                await until(lambda: len(server.asked) == 1)
                proxy.cut()
                with pytest.raises(ControllerGone, match="the controller is gone"):
                    await ends.running
                assert server.cancelled == 1
                with pytest.raises(ServerUnreachable):
                    await sampling
        pool.connections.close()

    asyncio.run(main())


def test_a_worker_asks_how_far_a_server_is_and_a_request_that_grows_is_not_ended():
    """The controller itself asks no server: thousands of connections would be open for it."""

    class Growing(Server):
        async def progress(self) -> Progress:
            self.sampled += 1
            if self.sampled == 12:
                self.until.set()  # eight looks without growth would have ended it
            return await super().progress()

    async def body(ends: Ends) -> None:
        ends.server.until.clear()
        rollout = await ends.sample(limit_s=0.4)
        assert rollout.key == "r-0"
        found = await ends.pool._progress(ServerClient(URL, timeout_s=1))
        assert found == Progress({"r-0": ends.server.sampled}, frozenset({"waits"}))

    drive(body, Growing())


def test_a_request_that_does_not_grow_is_ended_by_what_its_worker_sees():
    async def body(ends: Ends) -> None:
        ends.server.until.clear()
        with pytest.raises(ServerUnreachable) as error:
            await ends.sample(limit_s=0.2)
        assert error.value.timed_out
        assert error.value.stalled  # the server answered: the request alone is stuck
        assert ends.server.looks
        await until(lambda: ends.server.cancelled == 1)

    drive(body)
