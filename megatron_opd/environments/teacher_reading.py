"""Computes what a teacher reads of a trajectory in a rendering of its own.

Invariant: it reads the student's ids of what was sampled, and its own template's of all that was
given: the beginning, and what the environment said between turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_opd.data.chats import ASSISTANT, SYSTEM, Chat, chat_like
from megatron_opd.environments.play import Played
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.records.types import IntArray


@dataclass(frozen=True, slots=True)
class TeacherReader:
    """Reads trajectories for one teacher.

    encoder: of its tokenizer and template. student_system: the system message that was put in front
    of what the student reads, in whose place the teacher's own stands.
    """

    encoder: TurnEncoder
    student_system: str | None = None

    def given(self, played: Played) -> tuple[IntArray, ...]:
        """Return int32 [G] for each sampled run, the ids that are given in front of it.

        The trajectory is one sequence (environment.history append). ValueError: see
        TurnEncoder.written.
        """
        runs, (ids_S,) = played.trajectory.runs, played.trajectory.sequences
        said = [number for number, each in enumerate(played.chat) if each.role == ASSISTANT]
        turns = said[-len(played.turns) :]
        found: list[Sequence[int]] = [self.encoder.first(self._beginning(played.chat, turns[0]))]
        for number, run in enumerate(runs[:-1]):
            messages = played.chat[turns[number] + 1 : turns[number + 1]]
            sampled = ids_S[run.start : run.stop].tolist()
            found.append(self.encoder.added(messages, sampled, played.chat))
        return tuple(np.array(each, np.int32) for each in found)

    def _beginning(self, chat: Chat, length: int) -> Chat:
        first = chat[0]
        begun = first.role == SYSTEM and first.content == self.student_system
        return self.encoder.how.chat_of(chat_like(chat, chat[begun:length]))
