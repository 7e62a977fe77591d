"""Records what a controller needs to continue: where every admitted prompt is.

Invariant: a controller made from the state of another one accounts for the same samples: admitted =
consumed + dropped + those in `line`, each of which holds a permit.

A prompt whose rollout was under way is in the line as the prompt alone and is sampled anew, by a
newer version than before, so that no staleness bound is at risk. What was under way at a given
moment is longer than the average response; its random numbers are the prompt's, so that it is not
replaced by a shorter one (docs/schedules.md). Of a trajectory the finished turns are kept, and the
versions that sampled them. A rollout that was complete is kept, scored or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import msgspec

from megatron_opd.buffer.pass_rates import CurriculumState
from megatron_opd.buffer.spread import SpreadState
from megatron_opd.records.turns import SampledTurn
from megatron_opd.records.types import Prompt, Rollout, Sample

FORMAT = 2


class GroupMember(msgspec.Struct, frozen=True):
    """Holds one admitted prompt that is not trained on or dropped, in one of three fields.

    turns: those that a prompt's trajectory has finished.
    """

    prompt: Prompt | None = None
    rollout: Rollout | None = None
    sample: Sample | None = None
    turns: tuple[SampledTurn, ...] = ()

    @property
    def asked(self) -> Prompt:
        """Returns the prompt, in whichever stage it is."""
        if self.prompt is not None:
            return self.prompt
        if self.rollout is not None:
            return self.rollout.prompt
        assert self.sample is not None
        return self.sample.rollout.prompt

    @property
    def uid(self) -> int:
        """Returns the prompt's number."""
        return self.asked.uid

    def oldest_version(self, live: int) -> int:
        """Return the version of its stalest token; `live` for a prompt that has none yet."""
        rollout = self.sample.rollout if self.sample is not None else self.rollout
        if rollout is not None:
            return rollout.oldest_version
        return min([version for turn in self.turns for version, *_ in turn.reply.spans] or [live])


class ControllerState(msgspec.Struct, frozen=True):
    """Holds the state of a controller between two updates.

    version: live on every engine. next_uid: the first prompt that was not considered yet. line: in
    admission order. broken_groups, scored_in_groups: see buffer/groups.py. spread: of a filter, see
    buffer/spread.py. curriculum: see
    buffer/pass_rates.py. passed: rows that could not be used, by source, see data/stream.py.
    """

    updates: int
    version: int
    admitted: int
    consumed: int
    dropped: dict[str, int]
    dropped_in_a_row: int
    next_uid: int
    line: list[GroupMember]
    broken_groups: list[int] = []
    scored_in_groups: dict[int, int] = {}
    spread: SpreadState | None = None
    curriculum: CurriculumState | None = None
    passed: list[list[int]] = []
    format: int = FORMAT


NOTHING_YET = ControllerState(0, 0, 0, 0, {}, 0, 0, [])
"""The state of a run that has not begun."""


@dataclass(frozen=True, slots=True)
class StartedTrajectory:
    """Holds a prompt whose trajectory is under way, with the turns that it has finished."""

    prompt: Prompt
    turns: Sequence[SampledTurn]


Place = Prompt | StartedTrajectory | Rollout | Sample
"""How far an admitted prompt has come, with all arrays."""


def place(found: Place) -> GroupMember:
    """Return the place in the line of a prompt, trajectory under way, rollout or sample."""
    match found:
        case Prompt():
            return GroupMember(prompt=found)
        case StartedTrajectory():
            return GroupMember(prompt=found.prompt, turns=tuple(found.turns))
        case Rollout():
            return GroupMember(rollout=found)
        case Sample():
            # without what a stage has added for the learner, which is made again
            held = {field.name: getattr(found, field.name) for field in fields(Sample)}
            return GroupMember(sample=Sample(**held))
