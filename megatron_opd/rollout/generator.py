"""Turns a prompt into a Rollout: one request to the student's servers, its draws, its versions."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import msgspec

from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.config.schema import Config
from megatron_opd.records.drops import (
    ABORTED,
    EMPTY_RESPONSE,
    ROLLOUT_TIMED_OUT,
    STUDENT_UNAVAILABLE,
    STUDENT_UNREACHABLE,
)
from megatron_opd.records.seeds import ROLLOUT, derived_seed
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.turns import SampledTurn, digest_of
from megatron_opd.records.types import AnyRollout, IntArray, Prompt, Rollout, VersionSpan
from sglang_bridge.errors import BadReply, RequestAborted, ServerRefused, ServerUnreachable
from sglang_bridge.protocol import RolloutReply, RolloutRequest
from sglang_bridge.retry import Backoff, is_unserved, retried


class RolloutFleet(Protocol):
    """Names the method of sglang_bridge.fleet.Fleet that sampling needs."""

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """Return one sampled completion with its draws."""
        ...


class TurnFleet(Protocol):
    """Names the method of sglang_bridge.fleet.Fleet that sampling turns needs."""

    async def generate(self, request: RolloutRequest, *, prefer: str = "") -> RolloutReply:
        """Return one sampled turn with its draws; by the server `prefer`, if it serves."""
        ...


ResultT = TypeVar("ResultT")


class TurnHold(Protocol):
    """Names the method of controller.in_flight.Rollouts that sampling turns needs."""

    async def counted(self, sample: Callable[[], Awaitable[ResultT]]) -> tuple[ResultT, int]:
        """Return what `sample` returns, and how many tries before were thrown away."""
        ...


Sampler = Callable[[Prompt, RolloutRequest, int], Awaitable[AnyRollout]]
"""Samples one completion in one try; the number is that of the tries before it."""


@dataclass(frozen=True, slots=True)
class TurnStart:
    """Says what a turn follows. ids: all before it. number: from 0. room: most ids it may have.

    url: the server that sampled what comes before; empty: none did. stop: strings that end it,
    besides those of the run and of the prompt.
    """

    ids: IntArray
    number: int
    room: int
    url: str = ""
    stop: tuple[str, ...] = ()


class RolloutGenerator:
    """Samples completions; the caller chooses how many are in flight.

    Args:
        config: the behaviour distribution; the response limit and stop strings of prompts without
            their own; which actions are cached at every response position, of which those that the
            teacher selects are filled in at scoring time and the cache holds the path alone until
            then. Prompt i is sampled by the run's seed and i alone, unless rollout.seeded is false.
        fleet: the student servers.
        vocab_size: ids the student can sample.
        run_id: makes request names unique on servers that outlive a run.
        end_ids: the ids that end a response; a server may know only some of them itself.
        elsewhere: asks the servers in place of the fleet, for arrays that are kept elsewhere.
    """

    def __init__(
        self,
        config: Config,
        fleet: RolloutFleet,
        vocab_size: int,
        run_id: str,
        end_ids: tuple[int, ...],
        elsewhere: Sampler | None = None,
    ) -> None:
        self._fleet, self._elsewhere = fleet, elsewhere
        self._rollout, self._learner, self._seed = config.rollout, config.learner, config.run.seed
        support = config.estimator.support
        ours = support.owner == "student"
        self._num_atoms = support.num_atoms(vocab_size) if ours else 0
        self._num_draws = support.num_draws if ours else 0
        self._thin = support.thins
        self._run_id, self._end_ids = run_id, end_ids
        self._backoff = Backoff(config.rollout.attempts)
        self._numbers = itertools.count()
        self._slots = asyncio.Semaphore(config.rollout.concurrency)

    async def generate(self, prompt: Prompt) -> AnyRollout:
        """Return one completion of `prompt`, in rollout.attempts tries over all servers.

        A connection that breaks while its request is being served costs the tokens sampled so far:
        the rollout is sampled anew, by another server if there is one, and Rollout.restarts counts
        it. Longer responses are lost more often, but what is sampled anew is the same draw: every
        server makes the noise of a token from the prompt's seed and the token's position (unless
        rollout.seeded is false), so being lost selects no other response. By the same weights it
        is the same response up to rounding (docs/schedules.md says what newer ones change). A
        request that makes no progress is sampled anew too; one that grows is never cut off
        (sglang_bridge/deadlines.py).

        Raises RolloutRejected for a request that the server aborted, an empty response, and when
        no try was served (no answer, 429, 5xx): one prompt that no server can sample must not end
        a run, and where all are dropped the controller does. Every other failure is re-raised:
        servers that answer wrongly must stop the run.
        """
        return await self._served(lambda earlier: self._once(prompt, earlier))

    async def turn(
        self,
        fleet: TurnFleet,
        prompt: Prompt,
        follows: TurnStart,
        hold: TurnHold | None = None,
    ) -> SampledTurn:
        """Return one turn of a trajectory that is about `prompt`; raises as `generate` does.

        fleet: the student servers. hold: holds it back during a weight sync; None: it goes on with
        the new weights. At most rollout.concurrency turns are sampled at once. Each turn has noise
        of its own, which a try that is thrown away meets again. BadReply: it has no draws.
        """
        clock = asyncio.get_running_loop().time
        request = self._request(prompt, follows)
        begun_s = clock()

        async def once(earlier: int) -> tuple[RolloutReply, int]:
            rid = self._rid(prompt)  # the server may still be busy with a try that was lost
            asked = msgspec.structs.replace(request, rid=rid)
            return await fleet.generate(asked, prefer=follows.url), earlier

        aborted = 0
        async with self._slots:  # whoever waits for a slot is not waited for by a weight sync
            waited_s = clock() - begun_s
            if hold is None:
                reply, restarts = await self._served(once)
            else:
                (reply, restarts), aborted = await hold.counted(lambda: self._served(once))
        if len(reply.output_ids_T) == 0:
            raise RolloutRejected(EMPTY_RESPONSE, f"prompt {prompt.uid}, turn {follows.number + 1}")
        if reply.draws is None:
            raise BadReply(f"{reply.url}: a turn of prompt {prompt.uid} came back without draws")
        before, seconds = digest_of(follows.ids), clock() - begun_s
        return SampledTurn(len(follows.ids), before, reply, restarts + aborted, seconds, waited_s)

    async def _served(self, once: Callable[[int], Awaitable[ResultT]]) -> ResultT:
        try:
            return await retried(once, self._backoff, is_unserved)
        except RequestAborted as error:
            raise RolloutRejected(ABORTED, str(error)) from error
        except ServerUnreachable as error:
            raise RolloutRejected(
                ROLLOUT_TIMED_OUT if error.timed_out else STUDENT_UNREACHABLE, str(error)
            ) from error
        except ServerRefused as error:
            if not is_unserved(error):
                raise
            raise RolloutRejected(STUDENT_UNAVAILABLE, str(error)) from error

    async def _once(self, prompt: Prompt, restarts: int) -> AnyRollout:
        request = self._request(prompt)
        if self._elsewhere is not None:
            return await self._elsewhere(prompt, request, restarts)
        clock = asyncio.get_running_loop().time
        started_s = clock()
        reply = await self._fleet.generate(request)
        return as_rollout(prompt, request, reply, started_s, clock(), restarts)

    def _rid(self, prompt: Prompt) -> str:
        # a name of its own: the server may still be busy with a try that was lost or thrown away;
        # none begins with another, which SGLang would abort along with it
        return f"{self._run_id}-{prompt.uid}-{next(self._numbers)}."

    def _request(self, prompt: Prompt, follows: TurnStart | None = None) -> RolloutRequest:
        ids = prompt.token_ids_P if follows is None else follows.ids
        most = prompt.max_new_tokens or self._rollout.max_new_tokens
        later = (follows.number,) if follows is not None and follows.number else ()
        stop = () if follows is None else follows.stop
        seeded = self._rollout.seeded
        seed = derived_seed(self._seed, ROLLOUT, prompt.uid, *later) if seeded else None
        return RolloutRequest(
            rid=self._rid(prompt),
            input_ids=ids,
            max_new_tokens=most if follows is None else min(most, follows.room),
            temperature=self._rollout.temperature,
            top_p=self._rollout.top_p,
            num_atoms=self._num_atoms,
            num_draws=self._num_draws,
            thin=self._thin,
            record=True,
            experts=self._learner.replays_experts,
            gates=self._learner.replays_gates,
            stop_token_ids=self._end_ids,
            stop=tuple(dict.fromkeys((*self._rollout.stop, *prompt.stop, *stop))),
            seed=seed,
        )


def as_rollout(
    prompt: Prompt,
    request: RolloutRequest,
    reply: RolloutReply,
    started_s: float = 0.0,
    finished_s: float = 0.0,
    restarts: int = 0,
) -> Rollout:
    """Return a reply as a rollout.

    RolloutRejected: it is empty. BadReply: it has no draws.
    """
    if len(reply.output_ids_T) == 0:
        raise RolloutRejected(EMPTY_RESPONSE, f"prompt {prompt.uid}")
    if reply.draws is None:
        raise BadReply(f"{reply.url}: request {request.rid} came back without draws")
    rollout = single_turn(
        prompt,
        reply.output_ids_T,
        reply.draws,
        tuple(VersionSpan(*span) for span in reply.spans),
        reply.finish_reason,
        started_s,
        finished_s,
        reply.url,
    )
    routing = {"experts_XLk": reply.experts_XLk, "gates_XLk": reply.gates_XLk}
    return replace(rollout, restarts=restarts, **routing)
