"""Gives chats to a tokenizer's chat template: messages, tools, calls, thoughts.

Invariant: the template is given what the row holds, as apply_chat_template of transformers takes
it; what it does not read is told, or the row is a fault.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megatron_opd.config.wording import shown
from megatron_opd.data.calls import with_arguments
from megatron_opd.data.chats import ASSISTANT, DEVELOPER, SYSTEM, Chat, chat_like, tools_of
from megatron_opd.data.faults import Unusable
from megatron_opd.data.marks import AS_SYSTEM, UNREAD, Mark
from megatron_opd.data.template import CLOCK, names_in, sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOST = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys of messages whose content is lost where a template does not read them."""
LABELS = ("content", "name", "id", "tool_call_id")
"""Keys of messages that many templates leave out, and lose nothing by it."""


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    kwargs: Mapping[str, Any],
    clock: datetime,
    *,
    answer: bool,
) -> str:
    """Return the text of a chat. answer: begin one, or continue the last message; else it ends.

    kwargs: variables of the template. Raises what the template raises.
    """
    continues = answer and chat[-1].role == ASSISTANT
    known = _names(tokenizer)
    given: list[dict[str, Any]] = [
        {
            "role": SYSTEM if m.role == DEVELOPER and DEVELOPER not in known else m.role,
            "content": m.content,
            **m.others,
        }
        for m in chat
    ]

    def rendered(prints: list[str] | None = None) -> str:
        found = tokenizer.apply_chat_template(
            [with_arguments(message, prints) for message in given],
            tools=[dict(tool) for tool in tools_of(chat)] or None,
            tokenize=False,
            add_generation_prompt=answer and not continues,
            continue_final_message=continues,
            # a variable hides the global of that name, which is the clock of the machine
            **{CLOCK: clock.strftime, **kwargs},
        )
        return str(found)

    def called() -> str:
        prints: list[str] = []
        try:
            found = rendered(prints)
        except Exception:  # noqa: BLE001  a template is a program: it raises what it likes
            return rendered()
        return rendered() if prints else found

    if not any("tool_calls" in message for message in given):
        return rendered()
    if not any(message["content"] is None for message in given):
        return called()
    try:
        found = called()
    except Exception:  # noqa: BLE001  a template is a program: it raises what it likes
        found = None
    for message in given:
        message["content"] = message["content"] or ""  # as SGLang sends them to templates
    blank = called() if found is None or "None" in found else found
    printed = found is None or found.replace("None", "") == blank.replace("None", "")
    return blank if found is None or printed else found


def without(chat: Chat) -> Iterator[tuple[int, str, Chat]]:
    """Yield the number of a message, one of its LOST keys, and the chat without that key."""
    for number, message in enumerate(chat):
        for key in LOST:
            if key in message.others:
                bare = {name: each for name, each in message.others.items() if name != key}
                content = bare.pop("content", message.content)  # null only beside calls
                less = message._replace(content=content or "", others=bare)
                yield number, key, chat_like(chat, (*chat[:number], less, *chat[number + 1 :]))


def unread(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, dropped: Collection[tuple[int, str]] = ()
) -> list[Mark] | Unusable:
    """Return marks for what the template does not read of a chat, or why the row is a fault.

    dropped: numbers and keys of messages that it names, and of which it writes nothing here.
    """
    names = _names(tokenizer)
    marks: list[Mark] = []
    if tools_of(chat) and "tools" not in names:
        marks.append(Mark(UNREAD, f"{len(tools_of(chat))} tools"))
    for number, message in enumerate(chat, start=1):
        where = f"message {number} ({message.role})"
        for key in message.others:
            if key in LABELS or (key in names and (number - 1, key) not in dropped):
                continue
            if key not in LOST:
                what = f"{where} has the key {shown(key)}, which the chat template does not read"
                return Unusable("bad_chat", what)
            marks.append(Mark(UNREAD, f"{where} has {key}"))
        if message.role == DEVELOPER and DEVELOPER not in names:
            if any(each.role == SYSTEM for each in chat):
                what = "it has a developer message beside the system's, which the chat template"
                return Unusable("bad_chat", f"{what} does not know")
            marks.append(Mark(AS_SYSTEM, where))
    return marks


def _names(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    return frozenset[str]().union(*map(_names_of, sources(tokenizer).values()))


@lru_cache(maxsize=64)
def _names_of(source: str) -> frozenset[str]:
    return frozenset(names_in(source))
