"""Turns whole chats into examples, with the answers of each as what is learnt.

Invariant: an answer is learnt once, behind what the chat template writes before it. Answers share a
sequence as long as the template only appends; where it rewrites what came before, as Qwen3's leaves
out the thoughts of earlier answers, the next answer begins another sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from megatron_opd.config.sft import LossOn
from megatron_opd.data.answers import AnswerEncoder, Example, MarkedExample
from megatron_opd.data.chats import ASSISTANT, TOOL, USER, Chat, ChatMessage, chat_like
from megatron_opd.data.faults import Unusable
from megatron_opd.data.literal import SPOKEN, LiteralEncoder
from megatron_opd.data.marks import Mark
from megatron_opd.data.render import AnsweredTurn, Renderer
from megatron_opd.records.runs import SampledRun

SPELT = "spelt"


@dataclass(slots=True)
class _Growing:
    """Holds a sequence that may go on."""

    ids: list[int] = field(default_factory=list[int])
    runs: list[SampledRun] = field(default_factory=list[SampledRun])
    marks: list[Mark] = field(default_factory=list[Mark])

    def made(self) -> MarkedExample:
        """Return the example."""
        return Example(np.array(self.ids, dtype=np.int32), tuple(self.runs)), tuple(self.marks)


class ChatExamples:
    """Makes the examples of chats. renderer: has the same `literal`."""

    def __init__(self, renderer: Renderer, literal: LiteralEncoder, answers: AnswerEncoder) -> None:
        self._renderer, self._literal, self._answers = renderer, literal, answers

    def of(self, chat: str | Chat, key: str, loss_on: LossOn) -> Iterator[MarkedExample]:
        """Yield the examples of a chat. key: its column. Raises Unusable."""
        learnt = _answers_of(chat, key)
        assert not isinstance(chat, str), "a text has no answers"
        spelt = self._spelt(chat)
        growing = _Growing()
        for turn, n in enumerate(learnt if loss_on == "all" else learnt[-1:]):
            found = self._renderer.answered(chat_like(chat, chat[:n]), chat[n])
            if isinstance(found, Unusable):
                raise found
            if growing.runs and found.prompt[: len(growing.ids)] != growing.ids:
                yield growing.made()
                growing = _Growing()
            growing.ids = list(found.prompt)
            growing.marks += [*(mark for number, mark in spelt if number < n), *found.marks]
            self._learn(growing, found, chat, n, turn)
        yield growing.made()

    def _learn(self, growing: _Growing, found: AnsweredTurn, chat: Chat, n: int, turn: int) -> None:
        """Put message n behind a sequence."""
        behind = found.behind
        if self._answers.ended(self._answers.ids(found.text + behind)) is None:
            behind = behind.rstrip() + self._closing(chat, n, behind.rstrip())
        response, marks = self._answers.encoded(found.text, behind)
        start = len(growing.ids)
        growing.ids += response
        growing.runs.append(SampledRun(0, start, len(growing.ids), turn))
        growing.marks += marks
        if chat[n].others.get("tool_calls"):
            growing.marks += self._answers.cut(self._answers.ids(found.text + behind))

    def _closing(self, chat: Chat, n: int, behind: str) -> str:
        """Return the end token that the template writes once the chat goes on behind message n.

        GLM ends a turn with what begins the next one. behind: what is behind the answer's text, its
        calls. Empty: the template writes no end token there.
        """
        answer = chat[n]
        others = {name: each for name, each in answer.others.items() if name != "content"}
        spoken = ChatMessage(ASSISTANT, answer.content + SPOKEN, others)
        following = tuple(takewhile(lambda m: m.role != ASSISTANT, chat[n + 1 :]))
        text = self._renderer.written(
            chat_like(chat, (*chat[:n], spoken, *(following or _next(answer))))
        )
        _, _, rest = (text or "").rpartition(SPOKEN)
        ends = ((rest.index(name), name) for name in self._answers.end_names if name in rest)
        at, name = min(ends, default=(0, ""))
        return name if behind.endswith(rest[:at].strip()) else ""

    def _spelt(self, chat: Chat) -> list[tuple[int, Mark]]:
        """Return the indices and marks of messages that spell control tokens."""
        pairs = enumerate(zip(chat, self._literal.marked(chat), strict=True))
        return [
            (number, Mark(SPELT, f"message {number + 1} ({message.role})"))
            for number, (message, marked) in pairs
            if message != marked
        ]


def followed_by_another(number: int) -> Unusable:
    """Return the fault of a chat whose message `number` is an answer, and the next one too."""
    return Unusable("bad_chat", f"message {number}, an answer, is followed by another")


def _answers_of(chat: str | Chat, key: str) -> Sequence[int]:
    """Return the indices of a chat's answers. Raises Unusable."""
    if isinstance(chat, str):
        raise Unusable("wrong_type", f"{key!r} must be a list of messages, got a text")
    roles = [message.role for message in chat]
    first = roles.index(USER) if USER in roles else len(roles)
    found = [n for n, role in enumerate(roles) if role == ASSISTANT and n > first]
    if not found:
        raise Unusable("bad_chat", f"{key!r} has no assistant's message behind a user's")
    twice = next((n for n in found if roles[n - 1] == ASSISTANT), None)
    if twice is not None:
        raise followed_by_another(twice)
    return found


def _next(answer: ChatMessage) -> tuple[ChatMessage, ...]:
    """Return how a chat may go on behind its last answer."""
    calls = answer.others.get("tool_calls")
    if not calls:
        return (ChatMessage(USER, "Go on."),)
    return tuple(
        ChatMessage(
            TOOL,
            "Done.",
            {
                "name": call.get("function", call)["name"],
                **({"tool_call_id": call["id"]} if "id" in call else {}),
            },
        )
        for call in calls
    )
