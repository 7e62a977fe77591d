"""Reads messages that a row holds as text, as tables and exports write what they cannot nest.

Invariant: what looks like messages is read as messages or refused; no template is given the text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from megatron_opd.data.faults import Unusable

PAIRS = (("role", "content"), ("role", "tool_calls"), ("from", "value"))
"""Keys of a message, as chats and ShareGPT files write it."""
KEYS = tuple(dict.fromkeys(key for pair in PAIRS for key in pair))
LISTS = ("messages", "conversations", "conversation", "prompt")
"""Keys under which a mapping holds a list of messages."""
BEGINS = re.compile(
    rf"\s*(array\(|\()?\s*\[?\s*\{{\s*[bu]?['\"]({'|'.join((*KEYS, *LISTS))})['\"]\s*:\s*"
)


def messages_in(text: str, key: str) -> list[Any] | None:
    """Return the messages of a text that is a list of them as JSON; None: it is just a text.

    Raises Unusable for what is meant as messages in another spelling.
    """
    if not text.lstrip().startswith(("[", "{", "(", "array(", '"')):
        return None
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        # the keys must come first: a text may well speak of messages further on
        if BEGINS.match(text) is None or not any(all(k in text for k in pair) for pair in PAIRS):
            return None
        raise Unusable(
            "bad_chat",
            f"{key!r} is text that looks like messages and is not JSON, such as Python or NumPy "
            "print it; store the list itself, or json.dumps of it",
        ) from None
    if isinstance(value, str):  # encoded twice
        return messages_in(value, key)
    if isinstance(value, list) and any(map(_is_message, value)):
        return value
    if isinstance(value, dict) and (_is_message(value) or _holds_messages(value)):
        raise Unusable(
            "bad_chat",
            f"{key!r} is a mapping as JSON text; it must be a list of messages, or its JSON text",
        )
    return None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and any(value.keys() >= set(pair) for pair in PAIRS)


def _holds_messages(value: dict[str, Any]) -> bool:
    held = (value.get(name) for name in LISTS)
    return any(isinstance(each, list) and any(map(_is_message, each)) for each in held)
