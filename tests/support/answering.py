"""Orders to a data worker, and a server that answers it as it was told."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from megatron_opd.data_workers.messages import Generate, ScoreCall
from megatron_opd.data_workers.requests import encode_request
from megatron_opd.rollout.score_requests import TeacherAsk
from sglang_bridge.client import Endpoint
from sglang_bridge.parse import NOTHING_KNOWN
from sglang_bridge.protocol import Progress, RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from tests.support.fakes import make_sample

ENDPOINT = Endpoint("http://host:1", None, NOTHING_KNOWN)
REQUEST = RolloutRequest(
    rid="r-1",
    input_ids=np.arange(3, dtype=np.int32),
    max_new_tokens=8,
    temperature=0.7,
    top_p=0.9,
    num_atoms=2,
    num_draws=4,
    record=True,
    stop_token_ids=(1, 7),
    stop=("\n",),
    seed=11,
)
GENERATE = Generate(1, ENDPOINT, encode_request(REQUEST))
SCORE = ScoreCall(3, ENDPOINT, "r-1", TeacherAsk("s-1", 1.5, 0, 0, 7, 512), 100)
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
        self.looks = self.sampled = 0
        self.until.set()

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        return await self._answer(request, self.reply)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        return await self._answer(request, self.scores)

    async def progress(self) -> Progress:
        """Tell of no more progress than there was when it was asked before."""
        self.looks += 1
        return Progress({self.asked[-1].rid: self.sampled}, frozenset({"waits"}))

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
