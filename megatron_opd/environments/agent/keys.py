"""Compares messages by what they say, however a client writes them.

Two histories are the same where their keys are. An assistant's message is its text, without space
around it, and its calls: their ids, names and arguments as JSON values. What it thought is no part
of it, since clients leave it out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megatron_opd.data.calls import ARGUMENTS, as_mapping
from megatron_opd.data.chats import ASSISTANT, Chat, ChatMessage, tools_of

Digest = bytes
"""SHA-256 of the keys of a history, one after another."""


def reply_key(message: ChatMessage) -> str:
    """Return the key of an assistant's message."""
    calls = [_call(call) for call in message.others.get("tool_calls", ())]
    return _written([message.content.strip(), calls])


def message_key(message: ChatMessage, *, own: bool) -> str:
    """Return the key of a message. own: it is an assistant's that the endpoint returned."""
    if own:
        return reply_key(message)
    others = dict(message.others)
    if message.role == ASSISTANT:
        others["tool_calls"] = reply_key(message)
    return _written([message.role, message.content, others])


def beginning(chat: Chat) -> Digest:
    """Return what stands for a history of the tools of `chat` and no message."""
    return _digest(b"", _written(list(tools_of(chat))))


def extended(history: Digest, key: str) -> Digest:
    """Return what stands for a history with one message more."""
    return _digest(history, key)


def _digest(before: Digest, key: str) -> Digest:
    return hashlib.sha256(before + key.encode()).digest()


def _call(call: Mapping[str, Any]) -> list[Any]:
    function: Mapping[str, Any] = call.get("function", call)
    arguments = as_mapping(function.get(ARGUMENTS), "a call")
    return [call.get("id"), function["name"], arguments or {}]


def _written(value: Any) -> str:
    return json.dumps(_same(value), sort_keys=True)


def _same(value: Any) -> Any:
    """Return a value in which whole numbers are written in one way: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _same(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_same(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value
