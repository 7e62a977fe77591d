"""Two data workers that hold a batch, scripted for the controller and real for the ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from megatron_opd.data_workers import messages as w
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.data_workers.requests import decode_request
from megatron_opd.records.types import AnySample, Batch, HeldSample
from megatron_opd.rollout.scores import unscored
from megatron_opd.transport.samples import encode_sample
from sglang_bridge.client import ServerClient
from sglang_bridge.protocol import RolloutRequest
from tests.support.cutting_proxy import CuttingProxy
from tests.support.data_servers import RunningServer
from tests.support.data_workers import SHAPE, Peer
from tests.support.wire import KEYS

COUNT = 2


class HeldBatch:
    """Holds samples of `batch`, those that it was told to. proxies: the ranks' way to a worker."""

    def __init__(
        self,
        batch: Batch,
        pool: WorkerPool,
        servers: list[RunningServer],
        proxies: list[CuttingProxy],
    ) -> None:
        self.pool, self.servers, self.proxies = pool, servers, proxies
        self._batch, self._held = batch, dict[int, AnySample]()
        self._samples = {sample.rollout.prompt.uid: sample for sample in batch.samples}
        self.peers = [Peer(pool, i, address=proxy.address) for i, proxy in enumerate(proxies)]
        for peer in self.peers:
            peer.answer = self._answer

    async def hold(self, uid: int, worker: int) -> None:
        """Let a worker sample a prompt, with the outcome that the batch has."""
        sample = self._samples[uid]
        prompt = sample.rollout.prompt
        self.servers[worker].held[f"r-{uid}"] = list(map(bytes, encode_sample(sample)))
        ids = prompt.token_ids_P.tolist()
        request = RolloutRequest(rid=f"r-{uid}", input_ids=ids, max_new_tokens=64, num_draws=64)
        async with ServerClient(f"http://host:{worker + 1}", timeout_s=1e9) as client:
            rollout = await self.pool.generate(client, prompt, request)
        assert rollout.worker == f"data worker {worker}"
        self._held[uid] = HeldSample(rollout, SHAPE, sample.reward)

    def batch(self) -> Batch:
        """Return the batch as the controller has it."""
        samples = [self._held.get(uid, sample) for uid, sample in self._samples.items()]
        return replace(self._batch, samples=tuple(samples))

    async def end(self, worker: int) -> None:
        """End a worker: for the controller, and for the ranks."""
        self.peers[worker].end()
        await self.servers[worker].end()

    def _answer(self, order: w.Order) -> w.Answer | None:
        if not isinstance(order, w.Generate):
            return None
        uid = int(decode_request(order.request).rid.removeprefix("r-"))
        rollout = self._samples[uid].rollout
        spans = [(span.version, span.start, span.stop) for span in rollout.spans]
        figures = rollout.num_response_tokens, rollout.num_ids, unscored(rollout).cache
        return w.Generated(order.call, *figures, rollout.geometric_logps[0], spans, "stop")


@asynccontextmanager
async def held_batch(batch: Batch) -> AsyncIterator[HeldBatch]:
    """Both workers, connected to a pool; they hold nothing yet."""
    async with AsyncExitStack() as stack:
        pool = WorkerPool(COUNT, "127.0.0.1", KEYS, 1 << 20)
        pool.connections.open()
        stack.callback(pool.connections.close)
        servers = []
        for _ in range(COUNT):
            servers.append(RunningServer({}))
            stack.push_async_callback(servers[-1].end)
        proxies = [
            await stack.enter_async_context(CuttingProxy(server.address)) for server in servers
        ]
        made = HeldBatch(batch, pool, servers, proxies)
        for peer in made.peers:
            stack.callback(peer.end)
        async with asyncio.timeout(60):
            await pool.ready()
        yield made
