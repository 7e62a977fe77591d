"""Computes which ids a turn of the environment adds, so that what was sampled stays as it is.

Invariant: a turn's request is the ids so far and what `added` returns, which the chat template
writes behind a fixed conversation; nothing that was sampled is decoded and encoded again.

The fixed conversation is a user's message and an assistant's. What the template writes behind the
assistant's text is what a real turn lacks: what closes it, the new messages, the next generation
prompt. Where the sampled turn ends with an end token, that one stands for the template's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from megatron_opd.data.chats import ASSISTANT, TOOL, USER, Chat, ChatMessage, chat_like
from megatron_opd.data.literal import MARK, LiteralEncoder
from megatron_opd.data.render import Rendering, said
from megatron_opd.data.spoken import apply_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "qzprobe"
"""Beginning of the fixed assistant's text, which no template has in it."""
_ASKED = ChatMessage(USER, "What is 2 + 3?")


@dataclass(frozen=True, slots=True)
class _Tail:
    """Holds what follows a fixed assistant's turn.

    closed: an end token follows it whether or not it is the last; other families end a turn with
    what begins the next message.
    """

    text: str
    closed: bool


class TurnEncoder:
    """Encodes what an environment says, for one tokenizer and its chat template.

    end_ids: tokens that end a sampled turn. ValueError: see LiteralEncoder.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, how: Rendering, end_ids: Collection[int]
    ) -> None:
        self.tokenizer, self.how, self.end_ids = tokenizer, how, frozenset(end_ids)
        self.literal = LiteralEncoder(tokenizer)
        names: Any = tokenizer.convert_ids_to_tokens(sorted(self.end_ids))
        self._ends = tuple(name for name in names if name)
        self._closed: dict[bool, bool] = {}

    def rendered(self, chat: Chat, *, answer: bool = True) -> str:
        """Return the text of a chat; answer: with the beginning of one. Raises what it raises."""
        how = self.how
        return apply_template(self.tokenizer, chat, how.template_kwargs, how.clock, answer=answer)

    def written(self, marked: Chat, *, answer: bool = True) -> str:
        """Return what the template writes of marked messages; answer: as `rendered`.

        ValueError: it does not take them, or leaves out texts that look like control tokens.
        """
        try:
            text = self.rendered(marked, answer=answer)
        except Exception as error:  # noqa: BLE001  a template is a program: it raises what it likes
            raise ValueError(
                f"the chat template does not take the messages: {said(error)}"
            ) from None
        marks = sum(message.content.count(MARK) for message in marked)
        if text.count(MARK) < marks:
            raise ValueError(
                "the chat template must write messages as they are, and leaves out "
                f"{marks - text.count(MARK)} of {marks} texts that look like control tokens"
            )
        return text

    def first(self, chat: Chat) -> list[int]:
        """Return the ids of a conversation's beginning, with the generation prompt.

        ValueError: see `written`.
        """
        return self.literal.ids(self.written(self.literal.marked(chat)))

    def added(
        self, messages: Sequence[ChatMessage], sampled: Sequence[int], like: Chat = ()
    ) -> list[int]:
        """Return the ids between a sampled turn and the next one.

        messages: what is said, of users and tools. sampled: the turn's own ids. like: a
        conversation with the same tools. ValueError: see `written`.
        """
        chat = self.literal.marked(chat_like(like, messages))
        tail = self._tail(chat)
        ids = self.literal.ids(tail.text)
        ended = sampled[-1] if sampled and sampled[-1] in self.end_ids else None
        closes = ids[:1] == [ended] or (tail.closed and ids[0] in self.literal.control.values())
        return ids[1:] if ended is not None and closes else ids

    def closes(self, ids: Sequence[int]) -> bool:
        """Return whether ids behind a turn begin with what closes any turn."""
        turn = (_ASKED, ChatMessage(ASSISTANT, PROBE))
        return bool(ids) and ids[0] in self.end_ids and bool(self._is_closed(turn, PROBE))

    def _tail(self, chat: Chat) -> _Tail:
        text = "".join(message.content for message in chat)
        probe = next(word for n in count() if (word := f"{PROBE}{n}") not in text)
        called = self._behind_calls(chat, probe) if chat[0].role == TOOL else None
        if called is not None:
            return called
        turn = chat_like(chat, (_ASKED, ChatMessage(ASSISTANT, probe)))
        _, found, text = self.written(chat_like(chat, (*turn, *chat))).partition(probe)
        if not found:
            raise ValueError("the chat template leaves out the assistant's text")
        return _Tail(text, bool(self._is_closed(turn, probe)))

    def _is_closed(self, turn: Chat, probe: str) -> bool | None:
        """Return whether an end token closes a turn that is the last.

        None: the template does not write it. Looked up once for turns with and without calls.
        """
        calls = "tool_calls" in turn[-1].others
        if calls not in self._closed:
            behind = self._behind(turn, probe)
            if behind is None:
                return None
            end = self._first_end(behind)
            self._closed[calls] = end is not None if calls else end == 0
        return self._closed[calls]

    def _behind_calls(self, chat: Chat, probe: str) -> _Tail | None:
        """Return what follows a turn that calls tools, None where the template writes no calls."""
        calls: list[dict[str, Any]] = []
        for message in takewhile(lambda m: m.role == TOOL, chat):
            call = {"name": message.others.get("name", "tool"), "arguments": {"of": probe}}
            named = (
                {"id": message.others["tool_call_id"]} if "tool_call_id" in message.others else {}
            )
            calls.append({"type": "function", **named, "function": call})
        turn = chat_like(chat, (_ASKED, ChatMessage(ASSISTANT, "", {"tool_calls": calls})))
        try:
            text = self.rendered(chat_like(chat, (*turn, *chat))).rpartition(probe)[2]
        except Exception:  # noqa: BLE001  a template is a program: it raises what it likes
            return None
        found = self._first_end(text)
        closed = self._is_closed(turn, probe)
        return None if found is None or closed is None else _Tail(text[found:], closed)

    def before_end(self, text: str) -> str:
        """Return a text up to its first end token."""
        return text[: self._first_end(text)]

    def _first_end(self, text: str) -> int | None:
        """Return where the first end token of a text is."""
        return min((at for name in self._ends if (at := text.find(name)) >= 0), default=None)

    def _behind(self, turn: Chat, probe: str) -> str | None:
        """Return what follows a turn that is the last; None: the template does not write it."""
        try:
            _, found, behind = self.rendered(turn, answer=False).rpartition(probe)
        except Exception:  # noqa: BLE001  a template is a program: it raises what it likes
            return None
        return behind if found else None
