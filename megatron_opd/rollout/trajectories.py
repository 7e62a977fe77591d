"""Samples trajectories: the student's servers sample its turns, an environment answers them.

Invariant: what is trained on are the ids, draws and versions as the servers returned them, turn by
turn. A server works on a trajectory only while it samples a turn of it, and on a turn that goes on
from there again, where it has the keys and values of what came before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.environments.failed import EnvironmentFailed, HostLost
from megatron_opd.environments.play import Played, TurnSample
from megatron_opd.environments.playing import Playing
from megatron_opd.environments.protocol import row_of
from megatron_opd.environments.teacher_reading import TeacherReader
from megatron_opd.records.drops import ENVIRONMENT_BAD_REPLY
from megatron_opd.records.seeds import ENVIRONMENT, derived_seed
from megatron_opd.records.sequences import end_to_end, joined_draws
from megatron_opd.records.turns import NotReplayed, SampledTurn, turns_here
from megatron_opd.records.types import IntArray, Prompt, Rollout, TurnFigures, VersionSpan
from megatron_opd.rollout.generator import RolloutGenerator, TurnFleet, TurnHold, TurnStart
from sglang_bridge.protocol import RolloutReply

logger = logging.getLogger(__name__)

ENDED_BY_LIMIT = "length"
"""The finish_reason of a trajectory that a limit of section environment ended."""


MOST_HOSTS = 3
"""Hosts that may be lost under one trajectory: an environment may be what ends them."""


class TrajectoryGenerator:
    """Samples trajectories, each with an environment of its own.

    Args:
        turns: asks for single turns.
        fleet: the student servers.
        playing: runs the trajectories.
        run_seed: of what is random in environments, with a prompt's uid.
        hold: holds turns back during a weight sync; None: they go on with the new weights.
        readers: of the teachers that read what is given otherwise than the student, by name.
    """

    def __init__(
        self,
        turns: RolloutGenerator,
        fleet: TurnFleet,
        playing: Playing,
        run_seed: int,
        hold: TurnHold | None = None,
        readers: Mapping[str, TeacherReader] | None = None,
    ) -> None:
        self._turns, self._fleet = turns, fleet
        self._playing, self._hold, self._seed = playing, hold, run_seed
        self._readers = {} if readers is None else readers
        self._under_way: dict[int, _TurnSampler] = {}

    async def generate(self, prompt: Prompt) -> Rollout:
        """Return one trajectory about `prompt`.

        A turn that is lost is sampled anew as RolloutGenerator.turn does it; what came before
        stays. Raises RolloutRejected, as RolloutGenerator.generate does, and where the environment
        failed.
        """
        return await self.go_on(prompt, ())

    async def go_on(self, prompt: Prompt, kept: Sequence[SampledTurn]) -> Rollout:
        """Return a trajectory that begins with the turns of one that was interrupted.

        They are given to a new environment. Raises as `generate` does, and NotReplayed where the
        environment fails before it has answered all of them, or says anything else than before.
        One whose host is lost goes on in another host's process, or begins anew.
        """
        begun_s = asyncio.get_running_loop().time()
        lost = 0
        while True:
            sampler = _TurnSampler(self._sampled, prompt, kept)
            try:
                return await self._played(prompt, sampler, begun_s)
            except HostLost as failed:
                lost += 1
                if lost == MOST_HOSTS:
                    detail = f"{prompt.row_id}: {failed.detail}"
                    raise RolloutRejected(failed.reason, detail) from failed
                kept = sampler.finished
            except NotReplayed as error:
                if not lost:
                    raise
                logger.warning(
                    "%s: its host was lost, its environment does not go on (%s); it begins anew",
                    prompt.row_id or f"prompt {prompt.uid}",
                    error,
                )
                kept = ()

    async def _played(self, prompt: Prompt, sampler: _TurnSampler, begun_s: float) -> Rollout:
        row = row_of(prompt, derived_seed(self._seed, ENVIRONMENT, prompt.uid))
        self._under_way[prompt.uid] = sampler
        try:
            played = await self._playing.play(row, sampler)
        except HostLost:
            raise
        except EnvironmentFailed as failed:
            if sampler.replays:
                raise NotReplayed(f"{failed.reason}: {failed.detail}") from failed
            raise RolloutRejected(failed.reason, f"{prompt.row_id}: {failed.detail}") from failed
        finally:
            self._under_way.pop(prompt.uid, None)
        if sampler.left:
            raise NotReplayed(f"it ended after {len(played.turns)} of {sampler.num_kept} turns")
        finished_s = asyncio.get_running_loop().time()
        found = as_trajectory(prompt, played, sampler.turns, begun_s, finished_s)
        reader = self._readers.get(prompt.teacher)
        if reader is None:
            return found
        try:
            return replace(found, teacher_given=reader.given(played))
        except ValueError as error:
            detail = f"{prompt.row_id}: teacher {prompt.teacher} cannot read it: {error}"
            raise RolloutRejected(ENVIRONMENT_BAD_REPLY, detail) from error

    async def _sampled(self, prompt: Prompt, follows: TurnStart) -> SampledTurn:
        return await self._turns.turn(self._fleet, prompt, follows, self._hold)

    def under_way(self, uid: int) -> Sequence[SampledTurn]:
        """Return the finished turns of a trajectory; none of one that is not being sampled."""
        sampler = self._under_way.get(uid)
        return () if sampler is None else sampler.finished

    def turns_of(self, uid: int) -> Awaitable[Sequence[SampledTurn]]:
        """Return those that there are at the call, as ResumedTrajectories asks for them."""
        return turns_here(self.under_way(uid))


class _TurnSampler:
    """Samples the turns of one trajectory, of which it is given the first; see play.TurnSampler.

    turns: in the order in which they were returned. left: kept, and not returned yet. num_kept: how
    many there were.
    """

    def __init__(
        self,
        sample: Callable[[Prompt, TurnStart], Awaitable[SampledTurn]],
        prompt: Prompt,
        kept: Sequence[SampledTurn],
    ) -> None:
        self._sample, self._prompt = sample, prompt
        self.turns: list[SampledTurn] = []
        self._read: list[IntArray] = []  # by turn: all ids that its server has read and sampled
        self.left = list(kept)
        self.num_kept, self._begun = len(kept), 0

    @property
    def finished(self) -> tuple[SampledTurn, ...]:
        """Returns all turns: those that were given, and those that are kept for it."""
        return (*self.turns, *self.left)

    @property
    def replays(self) -> bool:
        """Returns whether no turn was sampled yet and some were kept."""
        return 0 < self.num_kept == len(self.finished)

    async def __call__(
        self, ids: Sequence[int], room: int, *, stop: Sequence[str] = ()
    ) -> TurnSample:
        """Return the next turn, sampled now or before. NotReplayed: none of those followed `ids`.

        Turns of several sequences may be sampled at once.
        """
        ids_S, number = np.asarray(ids, np.int32), self._begun
        self._begun += 1
        if self.left:
            kept = [at for at, turn in enumerate(self.left) if turn.is_after(ids_S)]
            if not kept:
                raise NotReplayed(f"it said something else before turn {number + 1}")
            turn = self.left.pop(kept[0])
        else:
            start = TurnStart(ids_S, number, room, self._nearest(ids_S), tuple(stop))
            turn = await self._sample(self._prompt, start)
        reply = turn.reply
        self.turns.append(turn)
        self._read.append(np.concatenate([ids_S, reply.output_ids_T]))
        cut = reply.finish_reason == ENDED_BY_LIMIT
        return TurnSample(reply.output_ids_T.tolist(), cut, reply.cached_tokens)

    def _nearest(self, ids_S: IntArray) -> str:
        """Return the server that has read most of the ids; the last of several."""
        alike = [_alike(ids_S, earlier) for earlier in self._read]
        nearest = max(range(len(alike)), key=lambda turn: (alike[turn], turn), default=None)
        return "" if nearest is None else self.turns[nearest].reply.url


def _alike(one: IntArray, other: IntArray) -> int:
    """Return how many ids two sequences have in common from their beginning."""
    most = min(len(one), len(other))
    different = np.flatnonzero(one[:most] != other[:most])
    return int(different[0]) if len(different) else most


def _spans(replies: Sequence[RolloutReply]) -> tuple[VersionSpan, ...]:
    """Return which versions sampled the turns' tokens, end to end."""
    found: list[VersionSpan] = []
    start = 0
    for reply in replies:
        for version, first, last in reply.spans:
            begin = start + first
            if found and found[-1].version == version:
                begin = found.pop().start
            found.append(VersionSpan(version, begin, start + last))
        start += len(reply.output_ids_T)
    return tuple(found)


def as_trajectory(
    prompt: Prompt,
    played: Played,
    sampled: Sequence[SampledTurn],
    started_s: float,
    finished_s: float,
) -> Rollout:
    """Return what was played as a rollout.

    sampled: the turns, in the order in which they came back. Those of several sequences may have
    been sampled in turns; the sampled tokens are those of one sequence after another.
    """
    built = played.trajectory
    turns = [run.turn for run in built.runs]
    assert sorted(turns) == list(range(len(sampled))), "each turn that was sampled is one run"
    replies = [sampled[turn].reply for turn in turns]
    draws = [reply.draws for reply in replies if reply.draws is not None]
    assert len(draws) == len(replies), "a turn has draws"
    # the last turn of a sequence read all of it: its reply has the experts of every input
    last = {run.sequence: reply for run, reply in zip(built.runs, replies, strict=True)}
    ended = "stop" if played.ended == "done" else ENDED_BY_LIMIT
    return Rollout(
        prompt=prompt,
        sequences=built.sequences,
        runs=built.runs,
        draws=joined_draws(draws),
        spans=_spans(replies),
        finish_reason=ended,
        started_s=started_s,
        finished_s=finished_s,
        engine=sampled[-1].reply.url,
        restarts=sum(turn.restarts for turn in sampled),
        experts_XLk=end_to_end([reply.experts_XLk for reply in last.values()]),
        gates_XLk=end_to_end([reply.gates_XLk for reply in last.values()]),
        reward=played.reward,
        turns=tuple(
            TurnFigures(
                sampling_s=turn.sampling_s,
                environment_s=answered.environment_s,
                calls=answered.num_calls,
                call_errors=answered.num_call_errors,
                cached=turn.reply.cached_tokens,
                reward=answered.reward,
                branch=answered.branch,
                ignored=answered.ignored,
                waiting_s=turn.waiting_s,
                made=answered.made,
                answered_by=answered.answered_by,
            )
            for turn, answered in zip(sampled, played.turns, strict=True)
        ),
    )
