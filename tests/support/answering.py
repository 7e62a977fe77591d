"""A server that answers a data worker as it was told."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from sglang_bridge.protocol import RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from tests.support.fakes import make_sample

ROLLOUT = make_sample(0).rollout
REPLY = RolloutReply(
    ROLLOUT.response_ids_T, "stop", ROLLOUT.draws, ((3, 0, 1), (4, 1, 4)), "http://host:1"
)
SCORES_N = np.linspace(-3, -0.5, ROLLOUT.num_ids, dtype=np.float32)
SCORES_N[ROLLOUT.draws.path_T[1]] = -np.log(100)  # as of a uniform distribution over 100 ids


class Server:
    """Stands for the client of a server: answers with what it was given, keeps what it was asked.

    until: it answers once this is set.
    """

    def __init__(self, reply: Any = REPLY, scores: Any = None) -> None:
        self.reply = reply
        self.scores = ScoreReply(SCORES_N) if scores is None else scores
        self.asked: list[RolloutRequest | ScoreRequest] = []
        self.until, self.cancelled = asyncio.Event(), 0
        self.until.set()

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        return await self._answer(request, self.reply)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        return await self._answer(request, self.scores)

    async def _answer(self, request: Any, reply: Any) -> Any:
        self.asked.append(request)
        await asyncio.sleep(0)
        try:
            await self.until.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(reply, Exception):
            raise reply
        return reply
