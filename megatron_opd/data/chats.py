"""Defines chats: messages of the system, user, assistant and tools, with what models may call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL = ROLES
LEADING = (SYSTEM, DEVELOPER)
"""Roles of messages that stand in front."""
NOTHING: Mapping[str, Any] = {}


class ChatMessage(NamedTuple):
    """Holds one turn of a chat. others: what a template is given besides, by name."""

    role: str
    content: str
    others: Mapping[str, Any] = NOTHING


Chat = tuple[ChatMessage, ...]


class RowChat(tuple[ChatMessage, ...]):
    """Holds the chat of a row. tools: what the model may call. written: the row has it as text."""

    tools: Sequence[Mapping[str, Any]] = ()
    written: bool = False

    @classmethod
    def of(
        cls,
        messages: Iterable[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        *,
        written: bool = False,
    ) -> RowChat:
        """Return the chat of these messages."""
        chat = cls(messages)
        chat.tools, chat.written = tools, written
        return chat


def chat_like(chat: Chat, messages: Iterable[ChatMessage]) -> Chat:
    """Return a chat of other messages, with the same tools."""
    return RowChat.of(messages, tools_of(chat))


def tools_of(chat: str | Chat) -> Sequence[Mapping[str, Any]]:
    """Return the tools that come with a prompt."""
    return chat.tools if isinstance(chat, RowChat) else ()


def messages_of(chat: str | Chat) -> tuple[dict[str, Any], ...]:
    """Return the messages of a chat as a chat template takes them; none of a text."""
    if isinstance(chat, str):
        return ()
    return tuple({"role": m.role, "content": m.content, **m.others} for m in chat)


def chat_of(messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Chat:
    """Return the chat of these messages; the opposite of `messages_of`."""
    return RowChat.of(map(_message, messages), tools)


def _message(fields: Mapping[str, Any]) -> ChatMessage:
    others = {name: value for name, value in fields.items() if name not in ("role", "content")}
    return ChatMessage(fields["role"], fields["content"], others)


def chat_text(chat: str | Chat) -> str:
    """Return what a chat asks, for people and comparisons: its only user message, or its turns."""
    if isinstance(chat, str):
        return chat
    asked = [message for message in chat if message.role not in LEADING]
    if len(asked) == 1:
        return asked[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in asked)
