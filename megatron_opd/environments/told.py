"""Describes a turn for people to read: its tool calls, and who answered it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_opd.data.chats import Chat
from megatron_opd.environments.calls import ToolCall
from megatron_opd.records.types import MadeCall

MOST_CHARACTERS = 2000
"""Most characters of the arguments of a call, which are among the sampled tokens too."""


def made_calls(calls: Sequence[ToolCall]) -> tuple[MadeCall, ...]:
    """Return the calls as they were read."""
    return tuple(
        MadeCall(
            _text(call.name),
            _text(_json(call.arguments)),
            None if call.error is None else _text(call.error),
        )
        for call in calls
    )


def answered_by(messages: Chat) -> str:
    """Return the roles of an answer, each once: "tool", "user" or both; none of none."""
    return ", ".join(dict.fromkeys(message.role for message in messages))


def _json(arguments: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(arguments), ensure_ascii=False, default=str)
    except RecursionError:
        return "too many levels"


def _text(found: str) -> str:
    """Return at most MOST_CHARACTERS, the halves of characters replaced."""
    whole = found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole if len(whole) <= MOST_CHARACTERS else f"{whole[:MOST_CHARACTERS]}…"
