"""Simulates trajectories: turns that servers sample, and an environment that takes its time.

Invariant: a trajectory's turns and the seconds of its answers follow from its prompt alone; what is
sampled, given and cached is counted as TrajectoryGenerator does in a run. An environment's seconds
pass on the clock and take no core of a shared host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.play import Played, PlayedTurn, TurnSampler
from megatron_opd.environments.protocol import EnvironmentRow
from megatron_opd.environments.trajectory import BuiltTrajectory, EndReason, TrajectoryLimits
from megatron_opd.records.drops import ENVIRONMENT_TOO_LONG
from megatron_opd.records.runs import SampledRun
from megatron_opd.records.seeds import ROLLOUT, derived_seed
from megatron_opd.sim.arrays import SharedArrays
from megatron_opd.sim.costs import TurnLength
from megatron_opd.sim.lengths import LengthDraws


@dataclass(frozen=True, slots=True)
class PlayedLength:
    """Says how long a turn is within the limits; see TurnLength. answer_s: None: it was cut."""

    given: int
    sampled: int
    answer_s: float | None


def turns_within(
    limits: TrajectoryLimits, turns: Sequence[TurnLength]
) -> tuple[list[PlayedLength], EndReason]:
    """Return the turns of a trajectory up to the first limit that it meets, and why it ends."""
    found: list[PlayedLength] = []
    length = sampled = 0
    for turn in turns:
        room, limit = limits.room(length + turn.given, sampled)
        if len(found) == limits.max_turns:
            return found, "max_turns"
        if not room:
            return found, limit
        if turn.sampled >= room:
            return [*found, PlayedLength(turn.given, room, None)], limit
        found.append(PlayedLength(turn.given, turn.sampled, turn.answer_s))
        length, sampled = length + turn.given + turn.sampled, sampled + turn.sampled
    return found, "done"


class SimulatedPlaying:
    """Runs the trajectories of one run; a prompt's text is its uid. Implements Playing.

    reward: of each turn of a uid's trajectory; None: the environment gives none.
    """

    def __init__(
        self,
        lengths: LengthDraws,
        limits: TrajectoryLimits,
        arrays: SharedArrays,
        run_seed: int,
        reward: Callable[[int], float] | None = None,
    ) -> None:
        self._lengths, self._limits, self._arrays = lengths, limits, arrays
        self._run_seed, self._reward = run_seed, reward
        self._asked: dict[int, int] = {}

    def turns(self, uid: int) -> tuple[TurnLength, ...]:
        """Return the turns of a prompt's trajectory, where no limit ends it before."""
        return self._lengths.trajectory(derived_seed(self._run_seed, ROLLOUT, uid))

    def asked(self, uid: int) -> int:
        """Return the tokens of the turn that is asked for now."""
        return self._asked[uid]

    async def play(self, row: EnvironmentRow, sample: TurnSampler) -> Played:
        """Run one trajectory; see Playing."""
        assert isinstance(row.prompt, str), "a simulated prompt is a text"
        uid, clock = int(row.prompt), asyncio.get_running_loop().time
        runs, turns, length = list[SampledRun](), list[PlayedTurn](), 0
        lengths, ended = turns_within(self._limits, self.turns(uid))
        if not lengths:
            what = f"a prompt of {self.turns(uid)[0].given} tokens leaves no room for a turn"
            raise EnvironmentFailed(ENVIRONMENT_TOO_LONG, what)
        for number, turn in enumerate(lengths):
            length += turn.given
            self._asked[uid] = turn.sampled
            # an array, of which no list is needed
            ids = cast(Any, self._arrays.ids(length))
            sampled = await sample(ids, self._limits.max_turn_tokens)
            stop = length + len(sampled.ids)
            runs.append(SampledRun(0, length, stop, number))
            length, begun_s = stop, clock()
            if turn.answer_s is None:
                turns.append(PlayedTurn(len(sampled.ids)))
                break
            await asyncio.sleep(turn.answer_s)
            given = None if self._reward is None else self._reward(uid)
            answer_s = clock() - begun_s
            turns.append(PlayedTurn(len(sampled.ids), reward=given, environment_s=answer_s))
        self._asked.pop(uid, None)
        built = BuiltTrajectory((self._arrays.ids(length),), tuple(runs))
        return Played(built, tuple(turns), ended, (), "")
