"""Finds in which format a model writes tool calls: the one in which its chat template writes them.

Invariant: a format that is found reads back a call that the template has written; where none of
ours does, the checkpoint's own response template is taken at its word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_opd.data.chats import ASSISTANT, USER, ChatMessage, RowChat
from megatron_opd.data.marks import alike
from megatron_opd.environments.calls import CallReader
from megatron_opd.environments.formats import CALLS, FORMATS, TEXT, THOUGHT
from megatron_opd.environments.turns import TurnEncoder

_NAME = "look_up"
_ARGUMENTS = {"word": "seven", "count": 7}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["word", "count"],
        },
    },
}


_FIELDS = {"content": TEXT, "tool_calls": CALLS, "reasoning_content": THOUGHT}
_FIELDS |= {"reasoning": THOUGHT, "thinking": THOUGHT}
"""What checkpoints call the fields of their response templates."""


def call_format(encoder: TurnEncoder, name: str | None = None) -> Mapping[str, Any]:
    """Return the response template of a format, or of the first that reads the template's calls.

    ValueError: there is none.
    """
    if name is not None:
        return FORMATS[name].template
    text = _written(encoder)
    for each in FORMATS.values():
        calls = CallReader(each.template, [_TOOL]).read(text, 0).calls
        if [(call.name, call.arguments, call.error) for call in calls] == [
            (_NAME, _ARGUMENTS, None)
        ]:
            return each.template
    own: Any = getattr(encoder.tokenizer, "response_template", None)
    if isinstance(own, dict) and "tool_calls" in own.get("fields", {}):
        fields = {_FIELDS.get(field, field): each for field, each in own["fields"].items()}
        return {"start_anchor_pattern": r"(?!)", "fields": fields}
    raise ValueError(
        "the student's chat template writes tool calls in no known format: name one in "
        f"environment.tool_format ({', '.join(FORMATS)}), or a template that writes them"
    )


def _written(encoder: TurnEncoder) -> str:
    """Return a turn that calls the tool as the template writes it, without what closes it."""
    call = {
        "type": "function",
        "id": "call00000",
        "function": {"name": _NAME, "arguments": _ARGUMENTS},
    }
    asked = RowChat.of((ChatMessage(USER, "How often?"),), (_TOOL,))
    turn = ChatMessage(ASSISTANT, "", {"tool_calls": [call]})
    try:
        opened = encoder.rendered(asked)
        closed = encoder.rendered(RowChat.of((*asked, turn), (_TOOL,)), answer=False)
    except Exception:  # noqa: BLE001  a template is a program: it raises what it likes
        return ""
    return encoder.before_end(closed[alike(opened, closed) :])
