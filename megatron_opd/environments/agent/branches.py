"""Finds where in a trajectory a call goes on, and computes the ids that its turn follows.

Invariant: each sampled id is in one run of one sequence, which holds the ids that the turn was
sampled from; wherever else it is read again it is given. An assistant's message that the endpoint
returned stands for its sampled ids, wherever the chat template still writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_opd.data.chats import ASSISTANT, LEADING, USER, Chat, ChatMessage, chat_like
from megatron_opd.data.literal import NOT_TEXT
from megatron_opd.environments.agent.keys import (
    Digest,
    beginning,
    extended,
    message_key,
    reply_key,
)
from megatron_opd.environments.preflight import History
from megatron_opd.environments.replayed import replayed, turn_text
from megatron_opd.environments.trajectory import BuiltTrajectory
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.records.branches import Branch
from megatron_opd.records.runs import SampledRun


@dataclass(slots=True)
class _Sequence:
    """Holds a sequence that grows. busy: a turn behind it is being sampled."""

    ids: list[int]
    runs: list[tuple[int, int, int]] = field(default_factory=list)  # start, stop, turn
    busy: bool = False


@dataclass(frozen=True, slots=True)
class _Turn:
    """Says where a sampled turn lies: the ids [start, stop) of a sequence."""

    sequence: _Sequence
    start: int
    stop: int

    @property
    def ids(self) -> list[int]:
        """Returns its sampled ids."""
        return self.sequence.ids[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        """Returns whether nothing follows it yet."""
        return not self.sequence.busy and len(self.sequence.ids) == self.stop


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Says which ids a turn follows. sequence: the one that it extends; None: a new one.

    branch: why it is a new one; empty for the first one and where it is none.
    """

    chat: Chat
    ids: list[int]
    sequence: _Sequence | None
    branch: Branch
    history: Digest


class Branches:
    """Holds the sequences of one trajectory."""

    def __init__(self, encoder: TurnEncoder, history: History) -> None:
        self._encoder, self._history = encoder, history
        self._sequences: list[_Sequence] = []
        self._asked: set[Digest] = set()
        self._answered: dict[Digest, list[_Turn]] = {}
        self._replies: dict[str, _Turn] = {}

    @property
    def num_sampled(self) -> int:
        """Returns the number of sampled ids of all sequences."""
        return sum(stop - start for each in self._sequences for start, stop, _ in each.runs)

    def __len__(self) -> int:
        """Returns the number of sequences."""
        return len(self._sequences)

    def place(self, chat: Chat) -> TurnPlace:
        """Return where a turn goes that answers `chat`. ValueError: as TurnEncoder.first."""
        own = [m.role == ASSISTANT and reply_key(m) in self._replies for m in chat]
        histories = [beginning(chat)]
        for message, mine in zip(chat, own, strict=True):
            histories.append(extended(histories[-1], message_key(message, own=mine)))
        whole = histories[-1]
        found = self._known(histories, chat)
        if found is None:
            branch = "edited" if any(own) else "new"
            branch = "sibling" if whole in self._asked else branch
            branch = branch if self._sequences else ""
            return TurnPlace(chat, self._written(chat, own), None, branch, whole)
        turn, number = found
        before = turn.sequence.ids[: turn.stop]
        if self._history == "append":
            ids = [*before, *self._encoder.added(chat[number:], turn.ids, chat)]
        else:
            ids = self._written(chat, own)
            if ids[: turn.stop] != before:
                return TurnPlace(chat, ids, None, "rewritten", whole)
        if turn.is_last:
            return TurnPlace(chat, ids, turn.sequence, "", whole)
        return TurnPlace(chat, ids, None, "sibling", whole)

    def begin(self, place: TurnPlace) -> _Sequence:
        """Give what a turn follows; until it is recorded nothing else extends its sequence."""
        sequence = place.sequence
        if sequence is None:
            sequence = _Sequence(place.ids)
            self._sequences.append(sequence)
        else:
            sequence.ids = place.ids
        sequence.busy = True
        self._asked.add(place.history)
        return sequence

    def record(
        self,
        place: TurnPlace,
        sequence: _Sequence,
        turn: int,
        ids: Sequence[int],
        said: ChatMessage,
    ) -> None:
        """Add a turn's sampled ids. said: the message that is returned for them."""
        start = len(sequence.ids)
        sequence.ids = [*sequence.ids, *ids]
        stop = len(sequence.ids)
        sequence.runs.append((start, stop, turn))
        sequence.busy = False
        recorded, key = _Turn(sequence, start, stop), reply_key(said)
        self._replies[key] = recorded
        after = extended(place.history, key)
        self._answered.setdefault(after, []).append(recorded)

    def built(self) -> BuiltTrajectory:
        """Return the trajectory, without what was given after the last turns of sequences."""
        found = [each for each in self._sequences if each.runs]
        return BuiltTrajectory(
            tuple(np.array(each.ids[: each.runs[-1][1]], dtype=np.int32) for each in found),
            tuple(
                SampledRun(number, *run) for number, each in enumerate(found) for run in each.runs
            ),
        )

    def _known(self, histories: Sequence[Digest], chat: Chat) -> tuple[_Turn, int] | None:
        """Return the turn behind which a chat goes on, and how many messages go up to it.

        None: an assistant's message is its last that the endpoint did not return there.
        """
        last = max((n for n, m in enumerate(chat, 1) if m.role == ASSISTANT), default=0)
        turns = self._answered.get(histories[last], [])
        # of equal ones the last that nothing follows
        free = [turn for turn in turns if turn.is_last] or turns
        return (free[-1], last) if free else None

    def _written(self, chat: Chat, own: Sequence[bool]) -> list[int]:
        """Return the ids of a history as the chat template writes it, with those sampled."""
        turns: list[Sequence[int]] = []
        spoken: list[ChatMessage] = []
        for message, mine in zip(chat, own, strict=True):
            if mine:
                turns.append(self._replies[reply_key(message)].ids)
                message = ChatMessage(ASSISTANT, turn_text(self._encoder, turns[-1]))
            elif message.role == ASSISTANT:
                turns.append(())
                if NOT_TEXT.search(message.content):
                    raise ValueError("an assistant's message holds characters that no text has")
            spoken.append(message)
        self._check_written(chat)
        if any(own):
            try:
                return replayed(self._encoder, chat_like(chat, spoken), turns)
            except ValueError:
                pass  # the template takes a tool's result behind a call of its own form alone
        return self._encoder.first(chat)

    def _check_written(self, chat: Chat) -> None:
        """Check that the template writes what leads and asks; some skip roles unknown to them."""
        marked = self._encoder.literal.marked(chat)
        text = self._encoder.written(marked)
        for number, message in enumerate(marked, start=1):
            if message.role in (*LEADING, USER) and message.content.strip() not in text:
                raise ValueError(
                    f"the chat template leaves out message {number}, of the role {message.role}"
                )
