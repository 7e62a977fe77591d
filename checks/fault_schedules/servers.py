"""Simulated SGLang servers and their clients: they die, hang, come back, and tell what they hold.

A server that jams, or stalls one request, answers that it is alive, as SGLang does: its front end
is a process of its own.

A token's id is the number of the weights that sampled it, so that whoever trains on it can check
what the version on its label stands for.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import numpy as np

from sglang_bridge.client import INFO_TIMEOUT_S, PauseMode, ServerClient
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.protocol import (
    DrawCache,
    Progress,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
    ServerInfo,
    WeightPiece,
)

VOCABULARY, TOKENS = 1_000_000, 4
INITIAL = 1
"""Number of the weights that every server and the learner start with."""
ALIVE_S = 5.0
REQUEST_S = 10.0
"""Longest time without progress: shorter than queues and pauses here, which must not count."""

Reply = TypeVar("Reply")
State = Literal["up", "dead", "hung", "jammed"]


class Server:
    """One server's process. pace: draws the seconds of one step of work.

    slots: requests that it works on at once; others wait. stalls: how many of the next steps of
    requests never end. poison: the request that never does.
    """

    def __init__(self, url: str, pace: Callable[[], float], slots: int, poison: str) -> None:
        self.url, self._pace, self._num_slots, self._poison = url, pace, slots, poison
        self.state: State = "up"
        self.changed = asyncio.Event()
        self.starts = self.timed_out = 0
        self._begin()

    def _begin(self) -> None:
        self.version, self.weights = 0, INITIAL
        self.paused = self.updating = False
        self.stalls = 0
        self.slots = asyncio.Semaphore(self._num_slots)
        self.running: dict[str, int] = {}
        self.waiting: list[str] = []

    def become(self, state: State) -> None:
        """Die, hang, jam, or go on. What is up after it was dead is a new process."""
        if self.state == "dead" and state == "up":
            self._begin()
            self.starts += 1
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()

    async def work(self) -> None:
        """Take one step. ServerUnreachable: it died; one that hangs takes none until it does."""
        began = self.starts
        if self.state == "dead":
            await asyncio.sleep(0.001)
            raise ServerUnreachable(self.url, "", "refused", sent=False)
        await asyncio.sleep(self._pace())
        while self.state in ("hung", "jammed") and self.starts == began:
            await self.changed.wait()
        self._still(began)

    async def step(self, rid: str) -> None:
        """Take one step of a request."""
        began = self.starts
        stalls = self.stalls > 0
        self.stalls -= stalls
        while (stalls or self._poison in rid) and self.state != "dead" and self.starts == began:
            await self.changed.wait()
        self._still(began)
        await self.work()
        self._still(began)

    @asynccontextmanager
    async def slot(self, rid: str) -> AsyncIterator[None]:
        """Run a request inside the block, once there is room for it."""
        running, waiting, slots, began = self.running, self.waiting, self.slots, self.starts
        waiting.append(rid)
        try:
            await slots.acquire()
        finally:
            waiting.remove(rid)
        running[rid] = 0
        try:
            self._still(began)
            yield
        finally:
            del running[rid]
            slots.release()

    def _still(self, began: int) -> None:
        if self.state == "dead" or self.starts != began:
            raise ServerUnreachable(self.url, "", "reset", sent=True)


class Client(ServerClient):
    """Talks to a simulated server as ServerClient does over HTTP."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        super().__init__(server.url, timeout_s=timeout_s)
        self.server = server

    async def info(self) -> ServerInfo:
        """See ServerClient, whose limit this has."""
        try:
            async with asyncio.timeout(INFO_TIMEOUT_S):
                await self.server.work()
        except TimeoutError as error:
            raise ServerUnreachable(self.url, "", "silent", sent=True) from error
        version = self.server.version
        return ServerInfo(self.url, "m", VOCABULARY, 64, 1, 1, version, "float32", 100, False)

    async def alive(self) -> bool:
        """See ServerClient."""
        if self.server.state == "dead":
            raise ServerUnreachable(self.url, "", "refused", sent=False)
        if self.server.state == "hung":
            await asyncio.sleep(ALIVE_S)
        return self.server.state in ("up", "jammed")

    async def version(self) -> int:
        """See ServerClient."""
        await self.server.work()
        return self.server.version

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """Sample a few tokens; a pause holds it, new weights go on with it."""
        return await self._within(request.rid, self._sample(request.rid))

    async def _sample(self, rid: str) -> RolloutReply:
        server = self.server
        versions: list[int] = []
        weights: list[int] = []
        await server.work()
        async with server.slot(rid):
            for number in range(TOKENS):
                await server.step(rid)
                while server.paused:
                    await server.work()
                assert not server.updating, "tokens are sampled from a mixture of weights"
                versions.append(server.version)
                weights.append(server.weights)
                server.running[rid] = number + 1
        cuts = [0, *(i for i in range(1, TOKENS) if versions[i] != versions[i - 1]), TOKENS]
        spans = tuple((versions[a], a, b) for a, b in itertools.pairwise(cuts))
        ids_T = np.array(weights, np.int32)
        return RolloutReply(ids_T, "stop", _draws(ids_T), spans, self.url)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """See ServerClient."""
        rid = f"{request.rid}-{next(self._numbers)}."
        return await self._within(rid, self._score(rid))

    async def _score(self, rid: str) -> ScoreReply:
        await self.server.work()
        async with self.server.slot(rid):
            await self.server.step(rid)
        return ScoreReply(np.full(TOKENS, -0.7, np.float32))

    async def _within(self, rid: str, work: Coroutine[Any, Any, Reply]) -> Reply:
        try:
            return await self.deadlines.within(rid, work)
        except ServerUnreachable as error:
            self.server.timed_out += error.timed_out
            raise

    async def progress(self) -> Progress:
        """See ServerClient."""
        await self.server.work()
        return Progress(dict(self.server.running), frozenset(self.server.waiting))

    async def abort(self, rid: str) -> None:
        """See ServerClient. Who waited for the reply is cancelled, and that ends it here."""

    async def pause(self, mode: PauseMode = "retract") -> None:
        """See ServerClient."""
        self.deadlines.stop()
        await self.server.work()
        self.server.paused = True

    async def resume(self) -> None:
        """See ServerClient."""
        await self.server.work()
        self.server.paused = False
        self.deadlines.go_on()

    async def flush_cache(self) -> None:
        """See ServerClient."""
        await self.server.work()

    async def begin_weight_update(self) -> None:
        """See ServerClient."""
        await self.server.work()
        assert self.server.paused, "an update begins while the server samples"
        self.server.updating = True

    async def end_weight_update(self, version: int) -> None:
        """See ServerClient."""
        await self.server.work()
        self.server.updating, self.server.version = False, version

    async def abandon_weight_update(self) -> None:
        """See ServerClient."""
        self.deadlines.stop()
        await self.server.work()
        self.server.paused, self.server.updating = True, False

    async def weight_digests(self, *, staged: bool = False) -> list[WeightPiece]:
        """See ServerClient."""
        await self.server.work()
        return [WeightPiece(0, "w", 0, 0, 1, "float32", str(self.server.weights))]


def paces(random: random.Random, mean_s: float) -> Callable[[], float]:
    """Return what draws steps of so many seconds on average."""
    return lambda: random.expovariate(1 / mean_s)


def _draws(ids_T: np.ndarray) -> DrawCache:
    """A cache of the sampled path alone."""
    count = len(ids_T)
    return DrawCache(
        offsets_T1=np.arange(count + 1, dtype=np.int64),
        ids_N=ids_T,
        weight_N=np.ones(count, np.float32),
        sampler_logp_N=np.full(count, -0.5, np.float32),
        path_T=np.arange(count, dtype=np.int64),
    )
