"""Samples trajectories: the student's servers sample its turns, an environment answers them.

Invariant: what is trained on are the ids, draws and versions as the servers returned them, turn by
turn. A server works on a trajectory only while it samples a turn of it, and on the next turn again,
where it has the keys and values of what came before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.data.chats import chat_of
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.hosted import EnvironmentHost
from megatron_opd.environments.play import Played, Player, TurnSample
from megatron_opd.environments.protocol import EnvironmentRow
from megatron_opd.records.seeds import ENVIRONMENT, derived_seed
from megatron_opd.records.sequences import end_to_end, joined_draws
from megatron_opd.records.types import Prompt, Rollout, TurnFigures, VersionSpan
from megatron_opd.rollout.generator import RolloutGenerator, SampledTurn, TurnFleet, TurnStart
from sglang_bridge.errors import BadReply
from sglang_bridge.protocol import DrawCache, RolloutReply

ENDED_BY_LIMIT = "length"
"""The finish_reason of a trajectory that a limit of section environment ended."""


@dataclass(frozen=True, slots=True)
class Playing:
    """Holds what plays the trajectories of a run.

    host: starts environments, and has been entered. player: runs a trajectory.
    """

    host: EnvironmentHost
    player: Player


class TrajectoryGenerator:
    """Samples trajectories, each with an environment of its own.

    Args:
        turns: asks for single turns.
        fleet: the student servers.
        playing: the environments' side.
        run_seed: of what is random in environments, with a prompt's uid.
    """

    def __init__(
        self,
        turns: RolloutGenerator,
        fleet: TurnFleet,
        playing: Playing,
        run_seed: int,
    ) -> None:
        self._turns, self._fleet = turns, fleet
        self._playing, self._seed = playing, run_seed

    async def generate(self, prompt: Prompt) -> Rollout:
        """Return one trajectory about `prompt`.

        A turn that is lost is sampled anew as RolloutGenerator.turn does it; what came before
        stays. Raises RolloutRejected, as RolloutGenerator.generate does, and where the environment
        failed.
        """
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        sampled: list[SampledTurn] = []

        async def sample(ids: Sequence[int], room: int) -> TurnSample:
            url = sampled[-1].reply.url if sampled else ""
            start = TurnStart(np.asarray(ids, np.int32), len(sampled), room, url)
            turn = await self._turns.turn(self._fleet, prompt, start)
            sampled.append(turn)
            ids_T = turn.reply.output_ids_T.tolist()
            return TurnSample(ids_T, cut=turn.reply.finish_reason == ENDED_BY_LIMIT)

        row = _row_of(prompt, derived_seed(self._seed, ENVIRONMENT, prompt.uid))
        try:
            async with self._playing.host.environment() as partner:
                played = await self._playing.player.play(partner, row, sample)
        except EnvironmentFailed as failed:
            raise RolloutRejected(failed.reason, f"{prompt.row_id}: {failed.detail}") from failed
        return as_trajectory(prompt, played, sampled, begun_s, clock())


def _row_of(prompt: Prompt, seed: int) -> EnvironmentRow:
    asked = chat_of(prompt.messages, prompt.tools) if prompt.messages else prompt.text
    return EnvironmentRow(asked, prompt.answer, seed)


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
    """Return what was played as a rollout. BadReply: a turn came without its draws.

    sampled: the turns, in order, which is that of the runs.
    """
    built, replies = played.trajectory, [turn.reply for turn in sampled]
    assert [run.turn for run in built.runs] == list(range(len(replies))), "runs are in turn order"
    draws: list[DrawCache] = []
    for reply in replies:
        if reply.draws is None:
            raise BadReply(f"{reply.url}: a turn of prompt {prompt.uid} came back without draws")
        draws.append(reply.draws)
    # the last turn of a sequence read all of it: its reply has the experts of every input
    last = {run.sequence: replies[run.turn] for run in built.runs}
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
        engine=replies[-1].url,
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
            )
            for turn, answered in zip(sampled, played.turns, strict=True)
        ),
    )
