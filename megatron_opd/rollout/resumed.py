"""Continues the trajectories that were under way when a run was interrupted.

Invariant: a trajectory has its finished turns in every checkpoint until it is whole or dropped. One
whose environment cannot be brought back to where it was begins anew, with the same random numbers,
and is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_opd.records.turns import NotReplayed, SampledTurn, turns_here
from megatron_opd.records.types import AnyRollout, Prompt

logger = logging.getLogger(__name__)

Turns = Sequence[SampledTurn]


class Trajectories(Protocol):
    """Samples trajectories, here or in data workers."""

    async def go_on(self, prompt: Prompt, kept: Turns) -> AnyRollout:
        """Return a trajectory that begins with these turns; see TrajectoryGenerator.go_on."""
        ...

    def turns_of(self, uid: int) -> Awaitable[Turns]:
        """Return the finished turns, those that there are at the call, of what is being sampled."""
        ...


@dataclass(slots=True)
class ResumeCounts:
    """Counts trajectories that had finished turns, and those of them that began anew."""

    resumed: int = 0
    begun_anew: int = 0


class ResumedTrajectories:
    """Implements controller.ports.RolloutEngine and UnfinishedTurns. counts: are added to."""

    def __init__(self, trajectories: Trajectories, counts: ResumeCounts) -> None:
        self._trajectories, self._counts = trajectories, counts
        self._kept: dict[int, Turns] = {}

    def restore(self, uid: int, turns: Turns) -> None:
        """Keep the turns that a checkpoint has of a prompt, until it is sampled."""
        self._kept[uid] = turns

    def turns_of(self, uid: int) -> Awaitable[Turns]:
        """Return the finished turns of a prompt, those that there are at the call."""
        if uid in self._kept:
            return turns_here(self._kept[uid])
        return self._trajectories.turns_of(uid)

    async def generate(self, prompt: Prompt) -> AnyRollout:
        """Return one trajectory; see TrajectoryGenerator.generate."""
        kept = self._kept.pop(prompt.uid, ())
        if kept:
            self._counts.resumed += 1
            try:
                return await self._trajectories.go_on(prompt, kept)
            except NotReplayed as error:
                self._counts.begun_anew += 1
                logger.warning(
                    "%s: its environment does not go on after %d turns (%s); it begins anew",
                    prompt.row_id or f"prompt {prompt.uid}",
                    len(kept),
                    error,
                )
        return await self._trajectories.go_on(prompt, ())
