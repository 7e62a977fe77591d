"""Writes answers as chat completions of OpenAI's, whole or as a stream of chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_opd.data.chats import ASSISTANT, ChatMessage
from megatron_opd.environments.agent.call import MODEL
from megatron_opd.environments.calls import CallReader, Reply
from megatron_opd.environments.formats import PLAIN
from megatron_opd.environments.told import made_calls
from megatron_opd.records.types import MadeCall


@cache
def _plain() -> CallReader:
    return CallReader(PLAIN, ())


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Counts the ids of a turn. cut: it was ended by a limit.

    given, cached: ids before it, and those of them that its server had computed before.
    """

    given: int
    sampled: int
    cached: int
    cut: bool


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """Holds what is answered to a call.

    calls: as OpenAI writes them; none where the turn is cut or any of its calls cannot be read,
    which then are text. num_calls: with those that cannot be read. num_wrong: those, and others
    that do not fit the tool's schema. made: all of them, for people to read.
    """

    text: str
    thought: str
    calls: tuple[dict[str, Any], ...]
    num_calls: int
    num_wrong: int
    tokens: TurnTokens
    made: tuple[MadeCall, ...] = ()

    @property
    def message(self) -> ChatMessage:
        """Returns the assistant's message as a client sends it back."""
        return ChatMessage(ASSISTANT, self.text, {"tool_calls": self.calls} if self.calls else {})

    @property
    def finish_reason(self) -> str:
        """Returns why it ends, in OpenAI's words."""
        return "length" if self.tokens.cut else "tool_calls" if self.calls else "stop"

    @property
    def usage(self) -> dict[str, Any]:
        """Returns its numbers of tokens."""
        tokens = self.tokens
        return {
            "prompt_tokens": tokens.given,
            "completion_tokens": tokens.sampled,
            "total_tokens": tokens.given + tokens.sampled,
            "prompt_tokens_details": {"cached_tokens": tokens.cached},
        }


def answer_of(
    reader: CallReader, text: str, turn: int, opened: str, tokens: TurnTokens
) -> AgentAnswer:
    """Return what answers a call with a turn's text.

    turn: its number, from 0. opened: what the template has begun it with.
    """
    said = reader.read(text, turn, opened)
    wrong = sum(call.error is not None for call in said.calls)
    calls = None if tokens.cut else _written(said)
    made = () if tokens.cut else made_calls(said.calls)
    if calls is None:
        plain, count = _plain().read(text, turn, opened), len(made)
        wrong = min(count, wrong or 1)
        return AgentAnswer(plain.text, plain.thought, (), count, wrong, tokens, made)
    return AgentAnswer(said.text, said.thought, calls, len(calls), wrong, tokens, made)


def _written(said: Reply) -> tuple[dict[str, Any], ...] | None:
    """Return the calls of a turn as OpenAI writes them; None: one of them cannot be read."""
    calls: list[dict[str, Any]] = []
    for call in said.calls:
        if call.unread:
            return None
        try:
            arguments = json.dumps(call.arguments, allow_nan=False)
        except (ValueError, RecursionError):  # an infinite number, as 1e999 is read
            return None
        function = {"name": call.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return tuple(calls)


def completion(name: str, answer: AgentAnswer) -> dict[str, Any]:
    """Return the whole answer. name: its id."""
    message: dict[str, Any] = {"role": ASSISTANT, "content": answer.text, "refusal": None}
    if answer.thought:
        message["reasoning_content"] = answer.thought
    if answer.calls:
        message |= {"content": answer.text or None, "tool_calls": answer.calls}
    choice = _choice("message", message, answer.finish_reason)
    return {**_head(name, "chat.completion"), "choices": [choice], "usage": answer.usage}


def chunks(name: str, answer: AgentAnswer, *, usage: bool) -> Iterator[bytes]:
    """Yield the answer as events of a stream. usage: with the numbers of tokens at its end."""
    deltas: list[dict[str, Any]] = [{"role": ASSISTANT, "content": ""}]
    if answer.thought:
        deltas.append({"reasoning_content": answer.thought})
    if answer.text:
        deltas.append({"content": answer.text})
    for index, call in enumerate(answer.calls):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    head = _head(name, "chat.completion.chunk")
    more: dict[str, Any] = {"usage": None} if usage else {}
    for delta in deltas:
        yield _event({**head, "choices": [_choice("delta", delta, None)], **more})
    yield _event({**head, "choices": [_choice("delta", {}, answer.finish_reason)], **more})
    if usage:
        yield _event({**head, "choices": [], "usage": answer.usage})
    yield b"data: [DONE]\n\n"


def models() -> dict[str, Any]:
    """Return the list of models."""
    return {"object": "list", "data": [model()]}


def model() -> dict[str, Any]:
    """Return the one that there is."""
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron-opd"}


def _head(name: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": MODEL}


def _choice(kind: str, said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, kind: said, "logprobs": None, "finish_reason": finish_reason}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
