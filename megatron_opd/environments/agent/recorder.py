"""Answers the calls of one trajectory within its limits, and records the turns that it samples.

Invariant: a turn is recorded with the ids that `sample` returned for it, in the order in which it
returned them, whoever still waits for the answer. A limit that is met ends the trajectory: later
calls are refused; but max_tokens is of a sequence, and calls that make another go on.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_opd.data.chats import ASSISTANT, Chat, ChatMessage, chat_like, tools_of
from megatron_opd.environments.agent.answers import AgentAnswer, TurnTokens, answer_of
from megatron_opd.environments.agent.branches import Branches, TurnPlace
from megatron_opd.environments.agent.call import AgentCall
from megatron_opd.environments.agent.refused import Refused
from megatron_opd.environments.calls import CallReader
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.formats import PLAIN
from megatron_opd.environments.play import (
    Played,
    PlayedTurn,
    TurnSample,
    TurnSampler,
    opened_by,
)
from megatron_opd.environments.preflight import History
from megatron_opd.environments.replayed import turn_text
from megatron_opd.environments.trajectory import EndReason, TrajectoryLimits
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.records.drops import (
    EMPTY_RESPONSE,
    ENVIRONMENT_BAD_REPLY,
    ENVIRONMENT_TIMED_OUT,
    ENVIRONMENT_TOO_LONG,
)

_OVER = "the trajectory has ended"
MOST_READERS = 256
"""Agents may make up tools without end."""


@dataclass(frozen=True, slots=True)
class Student:
    """Holds what reads and writes a student's turns.

    call_format: the response template of its tool calls; a text: why it has none.
    """

    encoder: TurnEncoder
    call_format: Mapping[str, Any] | str
    limits: TrajectoryLimits
    history: History = "append"
    readers: dict[str, CallReader] = field(default_factory=dict[str, CallReader])
    """By the JSON of their tools, whose schemas take a while to check."""

    def reader(self, chat: Chat) -> CallReader:
        """Return what reads the answers to a chat. Raises Refused."""
        key = json.dumps(tools_of(chat))
        if key not in self.readers:
            if len(self.readers) >= MOST_READERS:
                self.readers.clear()
            self.readers[key] = self._made(chat)
        return self.readers[key]

    def _made(self, chat: Chat) -> CallReader:
        tools, form = tools_of(chat), self.call_format
        if isinstance(form, str) and tools:
            raise Refused(form, key="tools")
        template = form if tools and not isinstance(form, str) else PLAIN
        try:
            return CallReader(template, tools)
        except (ValueError, RecursionError) as error:
            raise Refused(error, key="tools") from None


class AgentTrajectory:
    """Records one trajectory; must be made in the event loop, and closed.

    timeout_s: longest time in which the agent neither waits for a turn nor returns. broken: gets
    the error that ends the trajectory before the agent does.
    """

    def __init__(self, student: Student, sample: TurnSampler, timeout_s: float) -> None:
        self._student, self._sample = student, sample
        self._branches = Branches(student.encoder, student.history)
        self._turns: list[PlayedTurn] = []
        self._begun = 0  # turns
        self._reserved = 0  # ids that turns which are being sampled may have
        self._tasks: set[asyncio.Task[AgentAnswer]] = set()
        self._changed = asyncio.Event()
        self._closed = False
        self._limit: EndReason | None = None
        self._full = False  # no turn was finished since a sequence met max_tokens
        self._answer = ""
        self._chat: Chat = ()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock = _Clock(timeout_s, self._time_out)

    @property
    def limit(self) -> EndReason | None:
        """Returns the limit that has ended it, if one has, or that its last call met."""
        return self._limit or ("max_tokens" if self._full else None)

    async def answer(self, call: AgentCall) -> AgentAnswer:
        """Sample the turn that answers a call. Raises Refused.

        It is sampled and recorded to its end even where this is cancelled.
        """
        self._check_open()
        task = asyncio.get_running_loop().create_task(self._answered(call), name="agent's turn")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise _over() from None
        except Refused:
            raise
        except Exception:  # noqa: BLE001  _done hands it on: it ends the trajectory, not the server
            raise _over() from None

    def spoil(self, error: Exception) -> None:
        """End the trajectory with an error, if nothing has ended it before."""
        if not self.broken.done():
            self.broken.set_exception(error)

    async def close(self) -> None:
        """Let no call be answered any more; turns that are being sampled are given up."""
        if self._closed:
            return
        self._closed = True
        self._count(self._clock.stop())
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self.broken.cancel():
            self.broken.exception()  # told, or of no interest any more

    def played(self, reward: float | None) -> Played:
        """Return the trajectory, once it is closed. EnvironmentFailed: it has no turn."""
        if not self._turns:
            if self.limit is not None:
                what = f"what the agent asks leaves no room for a turn ({self.limit})"
                raise EnvironmentFailed(ENVIRONMENT_TOO_LONG, what)
            what = "the agent returned without a turn of the student's"
            raise EnvironmentFailed(ENVIRONMENT_BAD_REPLY, what)
        turns = (*self._turns[:-1], replace(self._turns[-1], reward=reward))
        ended: EndReason = self.limit or "done"
        return Played(self._branches.built(), turns, ended, self._chat, self._answer)

    async def _answered(self, call: AgentCall) -> AgentAnswer:
        reader = self._student.reader(call.chat)
        place, (room, limit) = await self._placed(call)
        most = min(room, call.most_tokens or room)
        sequence = self._branches.begin(place)
        self._begun += 1
        self._reserved += most
        self._count(self._clock.pause())
        try:
            turn = await self._sampled(place, most, call)
            text = turn_text(self._student.encoder, turn.ids)
            answer = self._read(reader, text, turn, place, call)
            self._branches.record(place, sequence, len(self._turns), turn.ids, answer.message)
            self._note(text, turn, answer, place, call)
            self._full = cut = turn.cut and most == room
            if cut and limit != "max_tokens":
                self._full, self._limit = False, self._limit or limit
            return answer
        finally:
            self._reserved -= most
            self._clock.go_on()
            self._changed.set()
            self._changed = asyncio.Event()

    async def _placed(self, call: AgentCall) -> tuple[TurnPlace, tuple[int, EndReason]]:
        """Return where a turn goes, how many ids it may have and why no more. Raises Refused.

        Waits while turns that are being sampled may still need the tokens that are left.
        """
        limits = self._student.limits
        while True:
            self._check_open()
            try:
                place = self._branches.place(call.chat)
            except (ValueError, RecursionError) as error:
                raise Refused(error, key="messages") from None
            if self._begun >= limits.max_turns:
                raise self._met("max_turns")
            if place.sequence is None and len(self._branches) >= limits.max_sequences:
                raise self._met("max_sequences")
            sampled = self._branches.num_sampled
            room, limit = limits.room(len(place.ids), sampled)
            if not room:
                raise self._too_long(place) if limit == "max_tokens" else self._met(limit)
            left = limits.most_sampled - sampled - self._reserved
            if left >= min(room, call.most_tokens or room) or not self._reserved:
                return place, (room, limit)
            await self._changed.wait()

    async def _sampled(self, place: TurnPlace, most: int, call: AgentCall) -> TurnSample:
        turn = await self._sample(list(place.ids), most, stop=call.stop)
        if not turn.ids:
            what = f"turn {len(self._turns) + 1} has no token"
            raise EnvironmentFailed(EMPTY_RESPONSE, what)
        return turn

    def _read(
        self, reader: CallReader, text: str, turn: TurnSample, place: TurnPlace, call: AgentCall
    ) -> AgentAnswer:
        """Return what a turn says, up to the first string that the call stops at."""
        text = text[: min((at for s in call.stop if (at := text.find(s)) >= 0), default=None)]
        opened = opened_by(self._student.encoder, place.ids)
        tokens = TurnTokens(len(place.ids), len(turn.ids), turn.cached, turn.cut)
        return answer_of(reader, text, len(self._turns), opened, tokens)

    def _note(
        self, text: str, turn: TurnSample, answer: AgentAnswer, place: TurnPlace, call: AgentCall
    ) -> None:
        self._turns.append(
            PlayedTurn(
                len(turn.ids),
                answer.num_calls,
                answer.num_wrong,
                branch=place.branch,
                ignored=len(call.ignored),
                made=answer.made,
                answered_by="agent",
            )
        )
        self._answer = answer.text
        self._chat = chat_like(place.chat, (*place.chat, ChatMessage(ASSISTANT, text)))

    def _check_open(self) -> None:
        if self._closed or self.broken.done():
            raise _over()
        if self._limit is not None:
            raise self._met(self._limit)

    def _met(self, limit: EndReason) -> Refused:
        """End the trajectory at a limit; return the refusal of a call that is beyond it."""
        self._limit = limit
        return Refused(f"{_OVER} at environment.{limit}: return, or raise it", code=limit)

    def _too_long(self, place: TurnPlace) -> Refused:
        """Return the refusal of a call that leaves its sequence no room; others may follow."""
        self._full = True
        most = self._student.limits.max_tokens
        return Refused(
            f"messages of {len(place.ids)} tokens leave no room for a turn within "
            f"environment.max_tokens, {most}: shorten them, or raise it",
            code="context_length_exceeded",
        )

    def _done(self, task: asyncio.Task[AgentAnswer]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, Refused):
            self.spoil(error)

    def _count(self, seconds: float) -> None:
        """Add the agent's own time to the turn before."""
        if self._turns:
            last = self._turns[-1]
            self._turns[-1] = replace(last, environment_s=last.environment_s + seconds)

    def _time_out(self, timeout_s: float) -> None:
        what = f"it took over {timeout_s:g} s without a turn"
        self.spoil(EnvironmentFailed(ENVIRONMENT_TIMED_OUT, what))


class _Clock:
    """Measures the time in which an agent waits for no turn.

    expired: called where it reaches timeout_s at once.
    """

    def __init__(self, timeout_s: float, expired: Callable[[float], None]) -> None:
        self._timeout_s, self._expired = timeout_s, expired
        self._waiting = 0  # turns that are being sampled
        self._loop = asyncio.get_running_loop()
        self._begun_s = time.monotonic()
        self._timer = self._loop.call_later(timeout_s, expired, timeout_s)

    def pause(self) -> float:
        """Note that a turn is being sampled. Returns the seconds up to it without any."""
        self._waiting += 1
        if self._waiting > 1:
            return 0.0
        self._timer.cancel()
        return time.monotonic() - self._begun_s  # a loop may count milliseconds

    def go_on(self) -> None:
        """Note that a turn is sampled."""
        self._waiting -= 1
        if not self._waiting:
            self._begun_s = time.monotonic()
            self._timer = self._loop.call_later(self._timeout_s, self._expired, self._timeout_s)

    def stop(self) -> float:
        """Stop for good. Returns as `pause` does."""
        return self.pause()


def _over() -> Refused:
    return Refused(_OVER, status=410, code="trajectory_ended")
