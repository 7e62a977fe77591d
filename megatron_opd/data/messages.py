"""Reads prompts that are lists of messages: system, user and assistant turns.

Invariant: a chat has at least one message, a system message only in front, and ends with the
user's, or with an assistant's that the model is to continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_opd.config.wording import shown
from megatron_opd.data.faults import Unusable
from megatron_opd.data.values import Row, present, read_text, unicode
from megatron_opd.data.written_chats import messages_in

SYSTEM, USER, ASSISTANT = ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    """Holds one turn of a chat."""

    role: str
    content: str


Chat = tuple[Message, ...]


class WrittenChat(tuple[Message, ...]):
    """Holds a chat that its row has as JSON text instead of as a list."""

    __slots__ = ()


def read_chat(row: Row, key: str) -> str | Chat:
    """Return a column that holds text, or a list of messages. Raises Unusable."""
    value, kind = present(row, key), tuple
    if isinstance(value, str) and (written := messages_in(value, key)) is not None:
        value, kind = written, WrittenChat
    if not isinstance(value, list | tuple):
        return read_text(row, key)
    chat = kind(_message(key, number, each) for number, each in enumerate(value, start=1))
    if not chat:
        raise Unusable("empty", f"{key!r} holds no messages")
    late = next((n for n, m in enumerate(chat, start=1) if n > 1 and m.role == SYSTEM), None)
    if late is not None:
        raise Unusable("bad_chat", f"message {late} of {key!r} is a system message, not the first")
    if chat[-1].role == SYSTEM:
        raise Unusable("bad_chat", f"{key!r} holds a system message and nothing to answer")
    if chat[-1].role == USER and not chat[-1].content.strip():
        raise Unusable("empty", f"the last message of {key!r} is empty")
    return chat


def chat_text(chat: str | Chat) -> str:
    """Return what a chat asks, for people and comparisons: its only user message, or its turns."""
    if isinstance(chat, str):
        return chat
    asked = [message for message in chat if message.role != SYSTEM]
    if len(asked) == 1:
        return asked[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in asked)


def _message(key: str, number: int, value: Any) -> Message:
    where = f"message {number} of {key!r}"
    if not isinstance(value, dict):
        raise Unusable("wrong_type", f"{where} must have role and content, got {shown(value)}")
    role, content = value.get("role"), value.get("content")
    others = [name for name in value if name not in ("role", "content") and value[name] is not None]
    if others:
        raise Unusable(
            "bad_chat", f"{where} has the key {shown(str(others[0]))}, which is not read"
        )
    if role not in ROLES:
        raise Unusable("bad_chat", f"{where} has the role {shown(role)}, not {_or(ROLES)}")
    if not isinstance(content, str):
        kind = type(content).__name__
        raise Unusable("wrong_type", f"the content of {where} must be a string, got {kind}")
    return Message(role, unicode(content, key))


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
