"""Runs one trajectory: the student's turns and its environment's, until either ends it.

Invariant: a turn is sampled from exactly the ids so far, and its ids go into the trajectory as they
were sampled; the environment is given their text, and only what it answers is encoded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from megatron_opd.config.wording import line
from megatron_opd.data.chats import ASSISTANT, Chat, ChatMessage, chat_like, tools_of
from megatron_opd.environments.calls import CallReader, Reply
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.formats import PLAIN
from megatron_opd.environments.guarded import Partner
from megatron_opd.environments.preflight import History
from megatron_opd.environments.protocol import EnvironmentRow
from megatron_opd.environments.replayed import replayed, turn_text
from megatron_opd.environments.told import answered_by, made_calls
from megatron_opd.environments.trajectory import (
    BuiltTrajectory,
    EndReason,
    TrajectoryBuilder,
    TrajectoryLimits,
)
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.records.branches import Branch
from megatron_opd.records.drops import EMPTY_RESPONSE, ENVIRONMENT_BAD_REPLY, ENVIRONMENT_TOO_LONG
from megatron_opd.records.turn_faults import MOST_REWARD, is_reward
from megatron_opd.records.types import MadeCall

ResultT = TypeVar("ResultT")
_OPENED = 32
"""Ids before a turn that say how the template has begun it."""


@dataclass(frozen=True, slots=True)
class TurnSample:
    """Holds the ids of one turn. cut: it was ended by its limit, and is not finished.

    cached: of the ids before it, those that its server had computed before.
    """

    ids: Sequence[int]
    cut: bool = False
    cached: int = 0


class TurnSampler(Protocol):
    """Samples the turns of one trajectory."""

    async def __call__(
        self, ids: Sequence[int], room: int, *, stop: Sequence[str] = ()
    ) -> TurnSample:
        """Return a turn that follows `ids`, of at most `room` ids, up to a string of `stop`."""
        ...


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """Counts one turn. reward: what the environment gave it, if anything.

    environment_s: seconds in which it was answered. branch: why it begins another sequence.
    ignored: settings that its call asked for, and that are the run's. made, answered_by: see
    records.TurnFigures.
    """

    num_sampled: int
    num_calls: int = 0
    num_call_errors: int = 0
    reward: float | None = None
    environment_s: float = 0.0
    branch: Branch = ""
    ignored: int = 0
    made: tuple[MadeCall, ...] = ()
    answered_by: str = ""


@dataclass(frozen=True, slots=True)
class Played:
    """Holds a trajectory that has come to its end.

    chat: what was said, the student's turns as text. answer: the text of the last turn.
    """

    trajectory: BuiltTrajectory
    turns: tuple[PlayedTurn, ...]
    ended: EndReason
    chat: Chat
    answer: str

    @property
    def reward(self) -> float | None:
        """Returns the sum over turns; None: the environment gave none."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        return sum(rewards) if rewards else None


class Player:
    """Runs trajectories of one student.

    call_format: the response template of its tool calls, None for environments without tools.
    """

    def __init__(
        self,
        encoder: TurnEncoder,
        call_format: Mapping[str, Any] | None,
        limits: TrajectoryLimits,
        history: History = "append",
    ) -> None:
        self._encoder, self._format, self._limits = encoder, call_format, limits
        self._history: History = history
        self._readers: dict[str, CallReader] = {}

    async def play(self, partner: Partner, row: EnvironmentRow, sample: TurnSampler) -> Played:
        """Run a trajectory. EnvironmentFailed: there is none; what `sample` raises."""
        chat = self._encoder.how.chat_of(await partner.start(row))
        builder = TrajectoryBuilder(_made(lambda: self._encoder.first(chat)), self._limits)
        if builder.limit is not None:
            what = f"a prompt of {len(builder.ids)} tokens leaves no room for a turn"
            raise EnvironmentFailed(ENVIRONMENT_TOO_LONG, what)
        turns: list[PlayedTurn] = []
        sampled: list[Sequence[int]] = []
        ended: EndReason | None = None
        branch: Branch = ""
        reply = Reply(0, "")
        while ended is None:
            opened, (room, limit) = opened_by(self._encoder, builder.ids), builder.room
            turn = await sample(list(builder.ids), room)
            if not turn.ids:
                raise EnvironmentFailed(EMPTY_RESPONSE, f"turn {len(turns) + 1} has no token")
            builder.sample(turn.ids)
            sampled.append(turn.ids)
            text = turn_text(self._encoder, turn.ids)
            reply = self._reader(chat).read(text, len(turns), opened)
            chat = chat_like(chat, (*chat, ChatMessage(ASSISTANT, text)))
            if turn.cut:
                turns.append(PlayedTurn(len(turn.ids), branch=branch))
                ended = limit
                continue
            begun_s = time.monotonic()
            answer = await partner.step(reply)
            wrong = sum(call.error is not None for call in reply.calls)
            turns.append(
                PlayedTurn(
                    len(turn.ids),
                    len(reply.calls),
                    wrong,
                    answer.reward,
                    time.monotonic() - begun_s,
                    branch,
                    made=made_calls(reply.calls),
                    answered_by=answered_by(answer.messages),
                )
            )
            ended = "done" if answer.ended else builder.limit
            if ended is None:
                chat = chat_like(chat, (*chat, *answer.messages))
                branch = self._go_on(builder, chat, answer.messages, sampled)
                ended = builder.limit
        played = Played(builder.built(), tuple(turns), ended, chat, reply.text)
        if not is_reward(played.reward or 0.0):
            what = f"its rewards must have a finite sum of at most {MOST_REWARD:g} in size"
            raise EnvironmentFailed(ENVIRONMENT_BAD_REPLY, what)
        return played

    def _go_on(
        self,
        builder: TrajectoryBuilder,
        chat: Chat,
        messages: Chat,
        sampled: Sequence[Sequence[int]],
    ) -> Branch:
        if self._history == "append":
            builder.give(_made(lambda: self._encoder.added(messages, sampled[-1], chat)))
            return ""
        rewritten = builder.replay(_made(lambda: replayed(self._encoder, chat, sampled)))
        return "rewritten" if rewritten else ""

    def _reader(self, chat: Chat) -> CallReader:
        tools = tools_of(chat)
        key = json.dumps(tools, default=str)
        if key not in self._readers:
            assert self._format is not None or not tools, "an environment with tools has a format"
            self._readers[key] = _made(lambda: CallReader(self._format or PLAIN, tools))
        return self._readers[key]


def opened_by(encoder: TurnEncoder, ids: Sequence[int]) -> str:
    """Return the last text before a turn, which says how the template has begun it."""
    tokenizer: Any = encoder.tokenizer
    return tokenizer.decode(ids[-_OPENED:], skip_special_tokens=False)


def _made(make: Callable[[], ResultT]) -> ResultT:
    """Return what is made of an environment's words. EnvironmentFailed: nothing can be."""
    try:
        return make()
    except ValueError as error:
        raise EnvironmentFailed(ENVIRONMENT_BAD_REPLY, line(error)) from None
