"""Orders to a data worker, and servers that answer it as they are told."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from megatron_opd.teacher.requests import TeacherAsk
from megatron_opd.workers.messages import Generate, Score
from sglang_bridge.client import Endpoint
from sglang_bridge.parse import NOTHING_KNOWN
from sglang_bridge.protocol import RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from tests.support.fakes import make_sample

ENDPOINT = Endpoint("http://host:1", None, NOTHING_KNOWN)
GENERATE = Generate(
    *(1, ENDPOINT, "r-1", np.arange(3, dtype=np.int32).tobytes(), 8, 0.7, 0.9, 2, 4, True),
    *(False, False, (5,), ("\n",), 11),
)
SCORE = Score(3, ENDPOINT, "r-1", TeacherAsk("s-1", 1.5, 0, 0, 7, 512), 100)
ROLLOUT = make_sample(0).rollout
REPLY = RolloutReply(
    ROLLOUT.response_ids_T, "stop", ROLLOUT.draws, ((3, 0, 1), (4, 1, 4)), "http://host:1"
)
SCORES_N = np.linspace(-3, -0.5, ROLLOUT.num_ids, dtype=np.float32)


class Server:
    """Answers with what it was given, and keeps what it was asked."""

    def __init__(self, reply: Any = REPLY, scores: Any = None) -> None:
        self.reply = reply
        self.scores = ScoreReply(SCORES_N) if scores is None else scores
        self.asked: list[RolloutRequest | ScoreRequest] = []

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        return await self._answer(request, self.reply)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        return await self._answer(request, self.scores)

    async def _answer(self, request: Any, reply: Any) -> Any:
        self.asked.append(request)
        await asyncio.sleep(0)
        if isinstance(reply, Exception):
            raise reply
        return reply
