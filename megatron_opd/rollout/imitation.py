"""Lets the teacher answer its share of the prompts, for the student to learn (sft_on_teacher).

An answer stands behind the student's prompt, id by id. Its log-probs are those of who wrote it, the
teacher, or 0 where a server shows none: no term of the loss reads them, as the student's own terms
leave the answer out (losses/weights.py). Its ids weigh nothing in the draw cache for the same
reason. The version is that of the student then: what a teacher writes does not get stale.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.config.schema import Config
from megatron_opd.data.response_text import Encode
from megatron_opd.records.drops import EMPTY_RESPONSE, TEACHER_UNKNOWN_ID
from megatron_opd.records.imitation import is_imitated
from megatron_opd.records.seeds import WRITING, derived_seed
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import AnyRollout, IntArray, Prompt, Rollout, VersionSpan
from megatron_opd.rollout.scorer import teacher_reason
from megatron_opd.teacher_apis.foreign import ForeignClient, WrittenText
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import DrawCache, RolloutReply, RolloutRequest
from sglang_bridge.retry import Backoff, retried


class Answers(Protocol):
    """Names the method of RolloutGenerator that the student's prompts need."""

    async def generate(self, prompt: Prompt) -> AnyRollout:
        """Return one completion of `prompt`."""
        ...


@dataclass(frozen=True, slots=True)
class StudentIds:
    """Says what the student reads. encode: of text. end_ids: end a response; written: in text."""

    vocab_size: int
    encode: Encode
    end_ids: tuple[int, ...]
    written: int


class ImitatingGenerator:
    """Samples the prompts of the student, and has the teachers answer the others.

    Args:
        config: which prompts, and how the teachers write.
        student: samples what is the student's own.
        teachers: the servers of every teacher, by the name that prompts use.
        ids: what the student reads.
        version: of the student's weights now.
        run_id: makes request names unique.
    """

    def __init__(
        self,
        config: Config,
        student: Answers,
        teachers: Mapping[str, Fleet],
        ids: StudentIds,
        version: Callable[[], int],
        run_id: str,
    ) -> None:
        term = config.estimator.imitation
        assert term is not None, "the objective imitates"
        self._config, self._term, self._share = config, term, config.estimator.imitated_share
        self._student, self._teachers, self._ids = student, teachers, ids
        self._version, self._run_id = version, run_id
        self._numbers = itertools.count()
        self._slots = asyncio.Semaphore(config.scoring.concurrency)
        self._backoff = Backoff(config.scoring.attempts)

    async def generate(self, prompt: Prompt) -> AnyRollout:
        """Return an answer to `prompt`, the teacher's or the student's. RolloutRejected."""
        if not is_imitated(prompt.uid, self._config.rollout.group_size, self._share):
            return await self._student.generate(prompt)
        clock = asyncio.get_running_loop().time
        async with self._slots:
            began_s = clock()
            try:
                found = await retried(lambda _: self._asked(prompt), self._backoff)
            except BridgeError as error:
                raise RolloutRejected(teacher_reason(error), str(error)) from error
        reply = self._as_ids(found) if isinstance(found, WrittenText) else found
        return self._rollout(prompt, reply, began_s, clock())

    async def _asked(self, prompt: Prompt) -> RolloutReply | WrittenText:
        config, uid = self._config, prompt.uid
        request = RolloutRequest(
            rid=f"{self._run_id}-{WRITING}-{uid}-{next(self._numbers)}.",
            input_ids=prompt.token_ids_P if prompt.teacher_ids_Q is None else prompt.teacher_ids_Q,
            max_new_tokens=prompt.max_new_tokens or config.rollout.max_new_tokens,
            temperature=self._term.temperature,
            record=True,
            stop_token_ids=self._ids.end_ids,
            stop=tuple(dict.fromkeys((*config.rollout.stop, *prompt.stop))),
            seed=derived_seed(config.run.seed, WRITING, uid),
        )
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)

        async def write(client: ServerClient) -> RolloutReply | WrittenText:
            if isinstance(client, ForeignClient):
                return await client.write(request, messages)
            return await client.generate(request)

        return await self._writer(prompt).ask(write, _tokens)

    def _writer(self, prompt: Prompt) -> Fleet:
        """Return the servers of the prompt's teacher; of a mixture one that is drawn by weight."""
        names, weights = zip(*prompt.shares, strict=True)
        rng = np.random.default_rng(derived_seed(self._config.run.seed, WRITING, prompt.uid, 1))
        return self._teachers[names[0] if len(names) == 1 else str(rng.choice(names, p=weights))]

    def _as_ids(self, found: WrittenText) -> RolloutReply:
        """Return an answer of which the text is known as the student's ids."""
        ids = self._ids.encode(found.text)
        if found.finish_reason == "stop":
            ids.append(self._ids.written)
        ids_T = np.array(ids, np.int32)
        return RolloutReply(ids_T, found.finish_reason, None, (), found.url)

    def _rollout(
        self, prompt: Prompt, reply: RolloutReply, began_s: float, ended_s: float
    ) -> Rollout:
        most = prompt.max_new_tokens or self._config.rollout.max_new_tokens
        ids_T, reason, logp_T = reply.output_ids_T, reply.finish_reason, _logp_of(reply)
        if len(ids_T) > most:  # the student's tokenizer cuts shorter pieces than the teacher's
            ids_T, logp_T, reason = ids_T[:most], logp_T[:most], "length"
        if len(ids_T) == 0:
            raise RolloutRejected(EMPTY_RESPONSE, f"prompt {prompt.uid}: the teacher wrote nothing")
        largest = int(ids_T.max())
        if largest >= self._ids.vocab_size:
            said = f"{largest}, the student has {self._ids.vocab_size} ids"
            raise RolloutRejected(TEACHER_UNKNOWN_ID, said)
        spans = (VersionSpan(self._version(), 0, len(ids_T)),)
        draws = _unread(ids_T, logp_T)
        return single_turn(prompt, ids_T, draws, spans, reason, began_s, ended_s, reply.url)


def _tokens(found: RolloutReply | WrittenText) -> int:
    return 0 if isinstance(found, WrittenText) else len(found.output_ids_T)


def _logp_of(reply: RolloutReply) -> Any:
    """Return float32 [T]: the teacher's log-probs of what it wrote; 0 where they are unknown."""
    if reply.draws is None:
        return np.zeros(len(reply.output_ids_T), np.float32)
    return reply.draws.sampler_logp_N[reply.draws.path_T]


def _unread(ids_T: IntArray, logp_T: Any) -> DrawCache:
    """Return a cache of the written ids alone, which weigh nothing."""
    index_T = np.arange(len(ids_T) + 1, dtype=np.int64)
    return DrawCache(
        offsets_T1=index_T,
        ids_N=ids_T,
        path_T=index_T[:-1],
        weight_N=np.zeros(len(ids_T), np.float32),
        sampler_logp_N=logp_T,
    )
