"""Asks the model under evaluation for one answer, or plays one trajectory with it, and judges it.

Invariant: whatever an answer, a trajectory or its verifier comes to is one outcome: what failed has
reward 0 and a reason. Only servers that answer wrongly and a problem that nothing judges raise.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opd.config.wording import shown
from megatron_opd.data.end_tokens import Ending
from megatron_opd.data.judge import Judge, reward_of_turns
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.play import Played, TurnSample
from megatron_opd.environments.playing import Playing
from megatron_opd.environments.protocol import row_of
from megatron_opd.errors import UserError
from megatron_opd.evaluation.ports import Completion, CompletionPort
from megatron_opd.records.seeds import ENVIRONMENT, EVALUATION, derived_seed
from megatron_opd.records.types import Prompt

TRAJECTORIES_A_TURN = 4
"""Trajectories at once for each turn that may be sampled at once. All servers are busy while an
environment takes at most three times as long to answer as a turn takes to be sampled; each
trajectory takes the memory of its environment's process."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Says how to sample for an evaluation.

    samples: k, answers to a problem. temperature: 0 = greedy. max_new_tokens: of a completion: of
    an answer, or of a turn with an environment. concurrency: completions in flight. seed: seeds all
    completions. stop: strings that end a completion, besides its problem's own.
    """

    samples: int
    temperature: float
    max_new_tokens: int
    concurrency: int
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("samples", "max_new_tokens", "concurrency"):
            if getattr(self, key) < 1:
                raise ValueError(f"evaluation: {key} must be >= 1, got {getattr(self, key)}")
        if self.temperature < 0:
            raise ValueError(f"evaluation: temperature must be >= 0, got {self.temperature}")


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """Counts what happened in a trajectory. call_errors: of the calls, those that were wrong.

    Of one that failed, turns are those that were sampled, and calls are not known: 0.
    """

    turns: int
    calls: int = 0
    call_errors: int = 0


@dataclass(frozen=True, slots=True)
class AnswerOutcome:
    """Holds what came of one answer to problem `problem`.

    num_tokens: sampled, of all turns. truncated: a limit ended it. versions: the oldest and the
    newest of the weights that sampled it. failure: why it has no judgement. counts: of its turns,
    None without an environment.
    """

    problem: int
    reward: float
    num_tokens: int
    truncated: bool
    versions: tuple[int, int] | None
    failure: str | None
    counts: TurnCounts | None = None


class Examiner:
    """Asks for answers to problems, several at once. Use from one event loop.

    Args:
        port: samples from the model.
        judge: says what an answer is worth; None: environments do.
        plan: how to sample; its concurrency bounds the turns that are sampled at once.
        playing: runs trajectories; None: each problem is answered once.
    """

    def __init__(
        self,
        port: CompletionPort,
        judge: Judge | None,
        plan: EvaluationPlan,
        playing: Playing | None = None,
    ) -> None:
        self._port, self._judge, self._plan, self._playing = port, judge, plan, playing
        self._slots = asyncio.Semaphore(plan.concurrency)

    @property
    def at_once(self) -> int:
        """Returns how many answers may be under way at once.

        A trajectory samples nothing while its environment answers, so there are more of them than
        turns that are sampled.
        """
        more = 1 if self._playing is None else TRAJECTORIES_A_TURN
        return self._plan.concurrency * more

    async def outcome(self, problem: int, prompt: Prompt, draw: int) -> AnswerOutcome:
        """Return what comes of one answer. problem, draw: decide what is random in it.

        UserError: neither the environment nor a verifier judges it; what the port raises.
        """
        if self._playing is None:
            return await self._answered(problem, prompt, draw)
        return await self._played(self._playing, problem, prompt, draw)

    def _ending(self, prompt: Prompt) -> Ending:
        return Ending(self._port.end_ids, self._plan.stop).beside(prompt.stop)

    async def _answered(self, problem: int, prompt: Prompt, draw: int) -> AnswerOutcome:
        ending = self._ending(prompt)
        seed = derived_seed(self._plan.seed, EVALUATION, problem, draw)
        most = self._plan.max_new_tokens
        completion = await self._complete(prompt.token_ids_P.tolist(), most, ending, seed)
        ids = completion.ids
        reward, failure = 0.0, None
        try:
            found = None if self._judge is None else await self._judge.reward(prompt, ids, ending)
            reward = found or 0.0
        except VerifierFailed as failed:
            failure = failed.reason
        end = ending.index(ids)
        return AnswerOutcome(
            problem=problem,
            reward=reward,
            num_tokens=len(ids) if end is None else end + 1,
            truncated=completion.finish_reason == "length",
            versions=completion.versions,
            failure=failure,
        )

    async def _played(
        self, playing: Playing, problem: int, prompt: Prompt, draw: int
    ) -> AnswerOutcome:
        ending = self._ending(prompt)
        numbers = itertools.count()
        replies: list[Completion] = []

        async def sample(ids: Sequence[int], room: int, *, stop: Sequence[str] = ()) -> TurnSample:
            number = next(numbers)
            later = (number,) if number else ()
            seed = derived_seed(self._plan.seed, EVALUATION, problem, draw, *later)
            most = min(self._plan.max_new_tokens, room)
            url = replies[-1].url if replies else ""
            reply = await self._complete(ids, most, ending.beside(stop), seed, url)
            replies.append(reply)  # turns of several sequences may be sampled at once
            return TurnSample(reply.ids, cut=reply.finish_reason == "length")

        row = row_of(prompt, derived_seed(self._plan.seed, ENVIRONMENT, problem, draw))
        played, reward, failure = None, 0.0, None
        try:
            played = await playing.play(row, sample)
            reward = await self._reward(prompt, played, ending)
        except (EnvironmentFailed, VerifierFailed) as failed:
            failure = failed.reason
        turns = () if played is None else played.turns
        versions = [version for reply in replies for version in reply.versions or ()]
        return AnswerOutcome(
            problem=problem,
            reward=reward,
            num_tokens=sum(len(reply.ids) for reply in replies),
            truncated=played is not None and played.ended != "done",
            versions=(min(versions), max(versions)) if versions else None,
            failure=failure,
            counts=TurnCounts(
                len(replies),
                sum(turn.num_calls for turn in turns),
                sum(turn.num_call_errors for turn in turns),
            ),
        )

    async def _complete(
        self, ids: Sequence[int], most: int, ending: Ending, seed: int, prefer: str = ""
    ) -> Completion:
        async with self._slots:
            return await self._port.complete(
                ids,
                max_new_tokens=most,
                temperature=self._plan.temperature,
                stop=ending.strings,
                seed=seed,
                prefer=prefer,
            )

    async def _reward(self, prompt: Prompt, played: Played, ending: Ending) -> float:
        """Return the reward of a trajectory; 0 for one that a limit ended before it had any.

        Raises VerifierFailed, UserError.
        """
        last = played.trajectory.last_turn_ids.tolist()
        reward = await reward_of_turns(self._judge, prompt, played.reward, last, ending)
        if reward is None and played.ended == "done":
            raise UserError(
                f"evaluation: the environment ended {prompt.row_id} ({shown(prompt.text, 60)}) "
                "without a reward, and the row has no answer that a verifier of data.task judges; "
                "end it with a reward, or give the row an answer (data.answer_key)"
            )
        return reward or 0.0
