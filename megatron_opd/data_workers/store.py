"""Stores the samples of one data worker: makes, judges and scores them as the controller asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.controller.snapshot import place
from megatron_opd.controller.snapshot_codec import decode_member, encode_member
from megatron_opd.data.end_tokens import Ending
from megatron_opd.data.judge import Judge
from megatron_opd.data_workers.faults import as_error
from megatron_opd.data_workers.messages import (
    Generate,
    Generated,
    GiveTurn,
    JudgeCall,
    JudgedCall,
    Look,
    Looked,
    NextStep,
    Play,
    SampleTurn,
    ScoreCall,
    ScoredCall,
    TrajectoryStep,
    TurnSampled,
)
from megatron_opd.data_workers.requests import decode_request
from megatron_opd.data_workers.under_way import Playroom, UnderWay, described
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.sequences import by_sequence
from megatron_opd.records.types import IntArray, Prompt, Rollout, Sample
from megatron_opd.rollout.generator import as_rollout
from megatron_opd.rollout.mixing import Blend
from megatron_opd.rollout.score_requests import asked_of
from megatron_opd.rollout.scores import unscored, with_scores
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
        room: plays trajectories; None: completions alone are asked for.
    """

    def __init__(
        self, clients: Clients, judge: Judge | None, draws: int, room: Playroom | None = None
    ) -> None:
        self._clients, self._judge, self._draws, self._room = clients, judge, draws, room
        self._under_way: dict[str, UnderWay] = {}
        self._held: dict[str, Rollout | Sample] = {}
        self._endings: dict[str, Ending] = {}
        """What ended the responses that are held, as their requests asked for it."""
        self._asked: set[str] = set()
        """Names of responses that are on their way."""
        self._blends: dict[str, dict[tuple[int, int], Blend]] = {}
        """What teachers of mixtures have said of what is held, by sequence and step."""

    def __len__(self) -> int:
        return len(self._held)

    async def generate(self, order: Generate) -> Generated:
        """Sample one completion, in one try. BridgeError. ValueError: nothing that can be asked."""
        request = decode_request(order.request)
        input_ids = np.asarray(request.input_ids)
        _check_ids(input_ids, order.endpoint.known.vocab_size)
        self._check_name(request.rid)
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

    async def play(self, order: Play) -> TrajectoryStep:
        """Begin a trajectory; return what it wants. ValueError: nothing that can be played.

        Raises as TrajectoryGenerator.go_on does.
        """
        self._check_name(order.key)
        member = decode_member(order.begun)
        if member.prompt is None or self._room is None:
            raise ValueError("this is no trajectory that can begin here")
        self._under_way[order.key] = self._room.begin(order.key, member.prompt, member.turns)
        return await self._step(order.call, order.key)

    async def next_step(self, order: NextStep) -> TrajectoryStep:
        """Return what else a trajectory wants. Raises as `play`. SamplesLost: there is none."""
        return await self._step(order.call, order.key)

    async def sample_turn(self, order: SampleTurn) -> TurnSampled:
        """Sample a turn that a trajectory wants, in one try. BridgeError. SamplesLost."""
        client = self._clients(order.endpoint)
        playing = self._playing(order.key)
        reply = await playing.sample(client.generate, order.wanted, order.rid)
        return TurnSampled(order.call, len(reply.output_ids_T), list(reply.spans))

    def give(self, order: GiveTurn) -> None:
        """Let a trajectory have its turn, if it is under way."""
        playing = self._under_way.get(order.key)
        if playing is not None:
            playing.give(order.wanted, None if order.failure is None else as_error(order.failure))

    async def _step(self, call: int, key: str) -> TrajectoryStep:
        try:
            found = await self._playing(key).next()
        except BaseException:
            self.release(key)
            raise
        if isinstance(found, Rollout):
            assert self._room is not None, "it plays"
            ending = self._room.ending.beside(found.prompt.stop)
            if self._under_way.pop(key, None) is not None:  # not released meanwhile
                self._held[key], self._endings[key] = found, ending
            return TrajectoryStep(call, described(found))
        return TrajectoryStep(call, found)

    def _playing(self, key: str) -> UnderWay:
        try:
            return self._under_way[key]
        except KeyError:
            raise SamplesLost(f"{key} is not under way") from None

    async def judge(self, order: JudgeCall) -> JudgedCall:
        """Give the reward of a response. VerifierFailed. SamplesLost: it is not held."""
        rollout = self._rollout(order.key)
        if self._judge is None:
            return JudgedCall(order.call, None)
        asked = replace(rollout.prompt, task=order.task, answer=order.answer)
        ids, ending = rollout.last_turn_ids.tolist(), self._endings[order.key]
        reward = await self._judge.reward(asked, ids, ending)
        return JudgedCall(order.call, reward)

    async def score(self, order: ScoreCall) -> ScoredCall:
        """Let a teacher score a sequence. BridgeError. ScoreRejected: its scores cannot be used."""
        sample = self._unencoded(order.key)
        if min(order.teacher_vocab_size, order.ask.vocab_size) < 1:
            raise ValueError(f"a teacher of {order.teacher_vocab_size} ids")
        parts = by_sequence(sample)
        if not 0 <= order.sequence < len(parts):
            raise ValueError(f"sequence {order.sequence} of {len(parts)}")
        before, step = self._blend(order, parts[order.sequence]), order.ask.step
        request = asked_of(before.part.rollout, order.ask)
        reply = await self._clients(order.endpoint).score(request)
        blend = before.after(order.ask, request, reply)
        shape = ScoreShape.of(blend.own_scores_T, order.teacher_vocab_size)
        held = order.key in self._held  # not released meanwhile
        if step is not None and not step.last:
            if held:
                self._blends.setdefault(order.key, {})[order.sequence, step.number] = blend
            ids = parts[order.sequence].rollout.num_ids  # what a mixture draws is there at its end
            return ScoredCall(order.call, ids, sample.cache, shape)
        parts[order.sequence] = part = blend.part
        sample = part if len(parts) == 1 else with_scores(sample, parts)
        if held:
            whole = not np.isnan(sample.teacher_logp_N).any()
            self._held[order.key] = EncodedSample.of(sample, self._draws) if whole else sample
        shape = replace(shape, parts=part.parts)
        return ScoredCall(order.call, part.rollout.num_ids, sample.cache, shape)

    def _blend(self, order: ScoreCall, part: Sample) -> Blend:
        """Return what the teachers asked before have said. ValueError: they were not asked."""
        step = order.ask.step
        if step is None or step.number == 0:
            return Blend(part)
        before = self._blends.get(order.key, {}).get((order.sequence, step.number - 1))
        if before is None:
            raise ValueError(f"step {step.number} of a mixture without the one before it")
        return before

    async def look(self, order: Look) -> Looked:
        """Ask a server how far it is with its requests, whoever sent them. BridgeError."""
        progress = await self._clients(order.endpoint).progress()
        return Looked(order.call, dict(progress.tokens), list(progress.waiting))

    def encoded(self, key: str) -> bytes:
        """Encode what is held or under way, for a checkpoint or a record. SamplesLost: neither."""
        if key in self._under_way:
            return encode_member(self._under_way[key].member)
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
        self._blends.pop(key, None)
        under_way = self._under_way.pop(key, None)
        if under_way is not None:
            under_way.end()

    def close(self) -> None:
        """Give up what is under way."""
        for key in list(self._under_way):
            self.release(key)

    def _check_name(self, name: str) -> None:
        """Raise ValueError for a name under which something else is kept."""
        if not name or name in self._held or name in self._asked or name in self._under_way:
            raise ValueError(f"{one_line(repr(name), 80)} is a name that is taken, or none")

    def _unencoded(self, key: str) -> Sample:
        """Return what is held with the scores of some of its sequences. SamplesLost: it is not."""
        found = self._found(key)
        if isinstance(found, Sample) and not isinstance(found, EncodedSample):
            return found
        return unscored(self._rollout(key))

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
