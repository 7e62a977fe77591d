"""Reads prompts that are lists of messages: system, user, assistant and tool turns.

Invariant: a chat has at least one message, messages of the system or the developer only in front,
and ends with the user's or a tool's, or with an assistant's that the model is to continue. What a
message holds besides its content reaches the template, or its row is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_opd.config.wording import shown
from megatron_opd.data.calls import read_calls, read_tools, whole
from megatron_opd.data.chats import (
    ASSISTANT,
    LEADING,
    NOTHING,
    ROLES,
    SYSTEM,
    TOOL,
    USER,
    Chat,
    ChatMessage,
    RowChat,
)
from megatron_opd.data.faults import Unusable
from megatron_opd.data.plain import unicode
from megatron_opd.data.values import Row, present, read_text, value_of
from megatron_opd.data.written_chats import messages_in

SHAREGPT = {
    **{"system": SYSTEM, "human": USER, "user": USER, "gpt": ASSISTANT, "assistant": ASSISTANT},
    **{"chatgpt": ASSISTANT, "model": ASSISTANT, "tool": TOOL, "observation": TOOL},
    **{"function_response": TOOL, "function_call": ASSISTANT},
}
"""Roles by what ShareGPT files say under `from`."""
CALL = "function_call"


def read_chat(row: Row, key: str, tools_key: str | None = None) -> str | Chat:
    """Return a column that holds text, or a list of messages. Raises Unusable.

    tools_key: the column of the tools that come with it; a row may lack it.
    """
    tools = () if tools_key is None else read_tools(value_of(row, tools_key), tools_key)
    value, written = present(row, key), None
    if isinstance(value, str):
        written = messages_in(value, key)
    found = value if written is None else written
    if not isinstance(found, list | tuple):
        text = read_text(row, key)
        return RowChat.of([ChatMessage(USER, text)], tools) if tools else text
    messages = [_message(key, number, each) for number, each in enumerate(found, start=1)]
    chat = RowChat.of(messages, tools, written=written is not None)
    if not chat:
        raise Unusable("empty", f"{key!r} holds no messages")
    front = 2 if [m.role for m in chat[:2]] == list(LEADING) else 1
    for number, message in enumerate(chat, start=1):
        if number > front and message.role in LEADING:
            what = f"message {number} of {key!r} is a {message.role} message, not the first"
            raise Unusable("bad_chat", what)
    if chat[-1].role in LEADING:
        last = f"a {chat[-1].role} message and nothing to answer"
        raise Unusable("bad_chat", f"{key!r} holds {last}")
    if chat[-1].role == USER and not chat[-1].content.strip():
        raise Unusable("empty", f"the last message of {key!r} is empty")
    return chat


def read_other_chat(row: Row, key: str, tools_key: str | None = None) -> str | Chat | None:
    """Return a column as read_chat does; None where it is missing, null or blank."""
    value = value_of(row, key)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return read_chat(row, key, tools_key)


def _message(key: str, number: int, value: Any) -> ChatMessage:
    where = f"message {number} of {key!r}"
    if not isinstance(value, dict):
        raise Unusable("wrong_type", f"{where} must have role and content, got {shown(value)}")
    message: dict[str, Any] = {name: each for name, each in value.items() if each is not None}
    if "from" in message and "role" not in message:
        message = _sharegpt(message, where)
    role = message.pop("role", None)
    content = message.pop("content", None)
    if role not in ROLES:
        raise Unusable("bad_chat", f"{where} has the role {shown(role)}, not {_or(ROLES)}")
    calls = read_calls(message.pop("tool_calls", None), where)
    if calls and role != ASSISTANT:
        raise Unusable("bad_chat", f"{where} has tool_calls, which only an assistant's may have")
    for name, each in message.items():
        whole(each, f"{name} of {where}")
    others = {**message, "tool_calls": calls} if calls else message
    if content is None and calls:  # as chats are sent over HTTP
        return ChatMessage(role, "", {"content": None, **others})
    text = _content(content, where)
    return ChatMessage(role, unicode(text, key), others or NOTHING)


def _content(content: Any, where: str) -> str:
    """Return a text, or those of a list of parts as templates write them: nothing between."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        kind = type(content).__name__
        raise Unusable("wrong_type", f"the content of {where} must be a string, got {kind}")
    texts: list[str] = []
    for number, part in enumerate(content, start=1):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        at = f"part {number} of the content of {where}"
        if not isinstance(part, dict):
            raise Unusable("wrong_type", f"{at} must have type and text, got {shown(part)}")
        given: dict[str, Any] = {name: each for name, each in part.items() if each is not None}
        kind = given.pop("type", None)
        if kind != "text":
            raise Unusable("bad_chat", f"{at} has the type {shown(kind)}; only text is read")
        text = given.pop("text", None)
        if not isinstance(text, str):
            raise Unusable("wrong_type", f"{at} must have a text, got {type(text).__name__}")
        if given:
            raise Unusable("bad_chat", f"{at} has the key {shown(min(given))}, which is not read")
        texts.append(text)
    return "".join(texts)


def _sharegpt(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message of a ShareGPT file, {from, value}, as others write it."""
    others = sorted(name for name in message if name not in ("from", "value"))
    if others:
        raise Unusable("bad_chat", f"{where} has the key {shown(others[0])}, which is not read")
    said, value = message["from"], message.get("value")
    role = SHAREGPT.get(said) if isinstance(said, str) else None
    if role is None:
        raise Unusable("bad_chat", f"{where} is from {shown(said)}, not {_or(tuple(SHAREGPT))}")
    if said != CALL:
        return {"role": role, "content": value}
    return {"role": role, "tool_calls": value}


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
