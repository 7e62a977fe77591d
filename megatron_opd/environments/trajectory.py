"""Builds the sequences of a trajectory out of given and sampled ids, within limits.

Invariant: each sampled id is in exactly one run, with the id that was sampled; a finished
trajectory's runs fit its sequences (records/runs.py), so that each sequence ends with a sampled id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_opd.config.environment import EnvironmentSection
from megatron_opd.records.runs import SampledRun, last_turn_of
from megatron_opd.records.types import IntArray

EndReason = Literal[
    "done", "max_turns", "max_tokens", "max_sampled_tokens", "max_turn_tokens", "max_sequences"
]
"""Why a trajectory ended: its environment said so, or the first limit that it met."""


@dataclass(frozen=True, slots=True)
class TrajectoryLimits:
    """Limits a trajectory. max_tokens: given and sampled ids of each of its sequences.

    max_turn_tokens: sampled ids of one turn. max_sequences: the first one included.
    max_sampled_tokens: sampled ids of all sequences together; None: what the others allow.
    """

    max_turns: int
    max_tokens: int
    max_turn_tokens: int
    max_sequences: int = 1
    max_sampled_tokens: int | None = None

    @property
    def most_sampled(self) -> int:
        """Returns the largest number of sampled ids that all limits together allow."""
        allowed = min(self.max_turns * self.max_turn_tokens, self.max_sequences * self.max_tokens)
        return min(self.max_sampled_tokens or allowed, allowed)

    def room(self, length: int, sampled: int) -> tuple[int, EndReason]:
        """Return how many ids the next turn may have, and the limit that leaves it no more.

        length: ids that it follows. sampled: ids of all turns before it, of all sequences.
        """
        rooms: list[tuple[int, EndReason]] = [
            (self.max_turn_tokens, "max_turn_tokens"),
            (self.max_tokens - length, "max_tokens"),
            (self.most_sampled - sampled, "max_sampled_tokens"),
        ]
        left, limit = min(rooms, key=lambda room: room[0])
        return max(left, 0), limit


def trajectory_limits(config: EnvironmentSection, max_new_tokens: int) -> TrajectoryLimits:
    """Return the limits of a trajectory; max_new_tokens: of a turn, where the section has none."""
    return TrajectoryLimits(
        config.max_turns,
        config.max_tokens,
        min(
            config.max_turn_tokens or max_new_tokens,
            config.max_tokens,
            config.max_sampled_tokens or config.max_tokens,
        ),
        config.most_sequences,
        config.max_sampled_tokens,
    )


@dataclass(frozen=True, slots=True)
class BuiltTrajectory:
    """Holds what was sampled and given. sequences: int32 [S] each. runs: see records/runs.py."""

    sequences: tuple[IntArray, ...]
    runs: tuple[SampledRun, ...]

    @property
    def num_sampled(self) -> int:
        """Returns the number of sampled ids, T."""
        return sum(run.num_tokens for run in self.runs)

    @property
    def last_turn_ids(self) -> IntArray:
        """Returns the ids of the turn that was sampled last."""
        return last_turn_of(self.sequences, self.runs)

    @property
    def num_given(self) -> int:
        """Returns the number of given ids of all sequences."""
        return sum(map(len, self.sequences)) - self.num_sampled


class TrajectoryBuilder:
    """Builds one trajectory, beginning with the ids of its prompt."""

    def __init__(self, prompt: Sequence[int], limits: TrajectoryLimits) -> None:
        self._limits = limits
        self._sequences = [list(prompt)]
        self._runs: list[SampledRun] = []
        self._turns = 0

    @property
    def ids(self) -> Sequence[int]:
        """Returns the ids of the sequence that grows: what the next turn follows."""
        return self._sequences[-1]

    @property
    def num_turns(self) -> int:
        """Returns the number of turns that were sampled."""
        return self._turns

    @property
    def room(self) -> tuple[int, EndReason]:
        """Returns how many ids the next turn may have, and why no more; 0: none, see `limit`."""
        return self._limits.room(len(self.ids), sum(run.num_tokens for run in self._runs))

    @property
    def limit(self) -> EndReason | None:
        """Returns the limit that leaves no further turn, None where there is room for one."""
        if self._turns >= self._limits.max_turns:
            return "max_turns"
        if len(self._sequences) > self._limits.max_sequences:
            return "max_sequences"
        room, limit = self.room
        return None if room else limit

    def sample(self, ids: Sequence[int]) -> None:
        """Add a turn's ids, of which there is at least one."""
        assert ids, "a turn without ids has nothing to learn from"
        growing = self._sequences[-1]
        start = len(growing)
        growing.extend(ids)
        run = SampledRun(len(self._sequences) - 1, start, len(growing), self._turns)
        self._runs.append(run)
        self._turns += 1

    def give(self, ids: Sequence[int]) -> None:
        """Add ids that were not sampled."""
        self._sequences[-1].extend(ids)

    def replay(self, ids: Sequence[int]) -> bool:
        """Continue from `ids`, the whole history anew; return whether that is another sequence."""
        growing = self._sequences[-1]
        if list(ids[: len(growing)]) == growing:
            growing.extend(ids[len(growing) :])
            return False
        self._sequences.append(list(ids))
        return True

    def built(self) -> BuiltTrajectory:
        """Return the trajectory, without what was given after its last turns.

        At least one turn was sampled.
        """
        assert self._runs, "a trajectory has a turn"
        ends = {run.sequence: run.stop for run in self._runs}
        number = {sequence: n for n, sequence in enumerate(sorted(ends))}
        return BuiltTrajectory(
            tuple(np.array(self._sequences[s][: ends[s]], dtype=np.int32) for s in sorted(ends)),
            tuple(
                SampledRun(number[run.sequence], run.start, run.stop, run.turn)
                for run in self._runs
            ),
        )
