"""Stores the samples of one data worker: makes, judges and scores them as the controller asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.controller.snapshot import place
from megatron_opd.controller.snapshot_codec import encode_member
from megatron_opd.data.end_tokens import Ending
from megatron_opd.data.judge import Judge
from megatron_opd.data_workers.messages import (
    Generate,
    Generated,
    JudgeCall,
    JudgedCall,
    Look,
    Looked,
    ScoreCall,
    ScoredCall,
)
from megatron_opd.data_workers.requests import decode_request
from megatron_opd.records.types import IntArray, Prompt, Rollout, Sample
from megatron_opd.rollout.generator import as_rollout
from megatron_opd.rollout.score_requests import asked_of
from megatron_opd.rollout.scores import scored, unscored
from megatron_opd.transport.samples import EncodedSample, Frames, frames_of
from sglang_bridge.client import Endpoint, ServerClient
from sglang_bridge.errors import one_line

Clients = Callable[[Endpoint], ServerClient]
"""Returns the client of a server, which knows what the endpoint says of it."""


class WorkerStore:
    """Samples, judges and scores, and keeps the arrays until they are released.

    Args:
        clients: of the servers.
        judge: gives the rewards; None where nothing asks for them.
        draws: see transport/samples.counted_draws.
    """

    def __init__(self, clients: Clients, judge: Judge | None, draws: int) -> None:
        self._clients, self._judge, self._draws = clients, judge, draws
        self._held: dict[str, Rollout | Sample] = {}
        self._endings: dict[str, Ending] = {}
        """What ended the responses that are held, as their requests asked for it."""
        self._asked: set[str] = set()
        """Names of responses that are on their way."""

    def __len__(self) -> int:
        return len(self._held)

    async def generate(self, order: Generate) -> Generated:
        """Sample one completion, in one try. BridgeError. ValueError: nothing that can be asked."""
        request = decode_request(order.request)
        input_ids = np.asarray(request.input_ids)
        _check_ids(input_ids, order.endpoint.known.vocab_size)
        if not request.rid or request.rid in self._held or request.rid in self._asked:
            raise ValueError(f"{one_line(repr(request.rid), 80)} is a name that is taken, or none")
        if not (0 <= request.temperature < math.inf and 0 < request.top_p <= 1):
            raise ValueError(f"temperature {request.temperature}, top_p {request.top_p}")
        self._asked.add(request.rid)
        try:
            reply = await self._clients(order.endpoint).generate(request)
        finally:
            self._asked.discard(request.rid)
        prompt = Prompt(uid=0, text="", token_ids_P=input_ids)
        rollout = as_rollout(prompt, request, reply)
        self._held[request.rid] = rollout
        self._endings[request.rid] = Ending(request.stop_token_ids, request.stop)
        return Generated(
            order.call,
            tokens=rollout.num_response_tokens,
            ids=rollout.num_ids,
            size=unscored(rollout).cache,
            geometric_logp=rollout.geometric_logps[0],
            spans=list(reply.spans),
            finish_reason=reply.finish_reason,
        )

    async def judge(self, order: JudgeCall) -> JudgedCall:
        """Give the reward of a response. VerifierFailed. SamplesLost: it is not held."""
        rollout = self._rollout(order.key)
        if self._judge is None:
            return JudgedCall(order.call, None)
        asked = replace(rollout.prompt, task=order.task, answer=order.answer)
        ids, ending = rollout.response_ids_T.tolist(), self._endings[order.key]
        reward = await self._judge.reward(asked, ids, ending)
        return JudgedCall(order.call, reward)

    async def score(self, order: ScoreCall) -> ScoredCall:
        """Let a teacher score a response. BridgeError. ScoreRejected: its scores cannot be used."""
        rollout = self._rollout(order.key)
        if min(order.teacher_vocab_size, order.ask.vocab_size) < 1:
            raise ValueError(f"a teacher of {order.teacher_vocab_size} ids")
        request = asked_of(rollout, order.ask)
        reply = await self._clients(order.endpoint).score(request)
        sample = scored(unscored(rollout), request, reply, order.ask.vocab_size)
        shape = sample.scores(order.teacher_vocab_size)
        assert shape is not None
        if order.key in self._held:  # not released meanwhile
            self._held[order.key] = EncodedSample.of(sample, self._draws)
        return ScoredCall(order.call, sample.rollout.num_ids, sample.cache, shape)

    async def look(self, order: Look) -> Looked:
        """Ask a server how far it is with its requests, whoever sent them. BridgeError."""
        progress = await self._clients(order.endpoint).progress()
        return Looked(order.call, dict(progress.tokens), list(progress.waiting))

    def encoded(self, key: str) -> bytes:
        """Encode what is held, for a checkpoint or a record. SamplesLost: it is not."""
        return encode_member(place(self._found(key)))

    def frames(self, key: str) -> Frames:
        """Return a sample as a learner rank receives it. SamplesLost. ValueError: malformed."""
        found = self._found(key)
        sample = found if isinstance(found, Sample) else unscored(found)
        return frames_of(EncodedSample.of(sample, self._draws))

    def release(self, key: str) -> None:
        """Let go of what is held under `key`, if anything is."""
        self._held.pop(key, None)
        self._endings.pop(key, None)

    def _found(self, key: str) -> Rollout | Sample:
        try:
            return self._held[key]
        except KeyError:
            raise SamplesLost(f"{key} is not held") from None

    def _rollout(self, key: str) -> Rollout:
        found = self._found(key)
        return found.rollout if isinstance(found, Sample) else found


def _check_ids(input_ids: IntArray, vocab_size: int) -> None:
    """Raise ValueError for a prompt that holds no ids, or others than a server's."""
    if len(input_ids) == 0 or input_ids.min() < 0 or input_ids.max() >= vocab_size:
        raise ValueError(f"a prompt must hold ids in 0..{vocab_size - 1}, at least one")
