"""Simulated SGLang servers and their clients: they die, hang, come back, and tell what they hold.

A token's id is the number of the weights that sampled it, so that whoever trains on it can check
what the version on its label stands for.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Literal

import numpy as np

from sglang_bridge.client import PauseMode, ServerClient
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.protocol import (
    DrawCache,
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


class Server:
    """One server's process. pace: draws the seconds of one step of work."""

    def __init__(self, url: str, pace: Callable[[], float]) -> None:
        self.url, self._pace = url, pace
        self.state: Literal["up", "dead", "hung"] = "up"
        self.changed = asyncio.Event()
        self.version, self.weights = 0, INITIAL
        self.paused = self.updating = False
        self.starts = 0

    def become(self, state: Literal["up", "dead", "hung"]) -> None:
        """Die, hang, or go on. What is up after it was dead is a new process."""
        if self.state == "dead" and state == "up":
            self.version, self.weights = 0, INITIAL
            self.paused = self.updating = False
            self.starts += 1
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()

    async def work(self) -> None:
        """Take one step. ServerUnreachable: it died; a hung server takes none until it does."""
        began = self.starts
        if self.state == "dead":
            await asyncio.sleep(0.001)
            raise ServerUnreachable(self.url, "", "refused", sent=False)
        await asyncio.sleep(self._pace())
        while self.state == "hung":
            await self.changed.wait()
        if self.state == "dead" or self.starts != began:
            raise ServerUnreachable(self.url, "", "reset", sent=True)


class Client(ServerClient):
    """Talks to a simulated server as ServerClient does over HTTP."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.url, timeout_s=600.0)
        self.server = server

    async def info(self) -> ServerInfo:
        """See ServerClient."""
        await self.server.work()
        version = self.server.version
        return ServerInfo(self.url, "m", VOCABULARY, 64, 1, 1, version, "float32", 100, False)

    async def alive(self) -> bool:
        """See ServerClient."""
        if self.server.state == "dead":
            raise ServerUnreachable(self.url, "", "refused", sent=False)
        if self.server.state == "hung":
            await asyncio.sleep(ALIVE_S)
        return self.server.state == "up"

    async def version(self) -> int:
        """See ServerClient."""
        await self.server.work()
        return self.server.version

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """Sample a few tokens; a pause holds it, new weights go on with it."""
        server = self.server
        versions: list[int] = []
        weights: list[int] = []
        for _ in range(TOKENS):
            await server.work()
            while server.paused:
                await server.work()
            assert not server.updating, "tokens are sampled from a mixture of weights"
            versions.append(server.version)
            weights.append(server.weights)
        cuts = [0, *(i for i in range(1, TOKENS) if versions[i] != versions[i - 1]), TOKENS]
        spans = tuple((versions[a], a, b) for a, b in itertools.pairwise(cuts))
        ids_T = np.array(weights, np.int32)
        return RolloutReply(ids_T, "stop", _draws(ids_T), spans, self.url)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """See ServerClient."""
        await self.server.work()
        return ScoreReply(np.full(TOKENS, -0.7, np.float32))

    async def pause(self, mode: PauseMode = "retract") -> None:
        """See ServerClient."""
        await self.server.work()
        self.server.paused = True

    async def resume(self) -> None:
        """See ServerClient."""
        await self.server.work()
        self.server.paused = False

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
