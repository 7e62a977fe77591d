"""Finds where a prompt's ids are not what its row seems to say, so that nobody is surprised.

A mark is no fault: the prompt is used. What it says is told once for each file and kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_opd.config.wording import shown
from megatron_opd.data.chats import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BOS_ONCE, BOS_AGAIN, SPECIAL, UNKNOWN = "bos_once", "bos_again", "special", "unknown"
JSON_TEXT, TRIMMED, REWRITTEN, OPENED = "json_text", "trimmed", "rewritten", "opened"
UNREAD, AS_SYSTEM = "unread", "as_system"
KINDS: Mapping[str, str] = {
    BOS_ONCE: "begin with the BOS token as text, so that none is put in front of it",
    BOS_AGAIN: "hold the BOS token more than once",
    SPECIAL: "hold special tokens written as text, which are read as these tokens",
    UNKNOWN: "hold text that the tokenizer does not know",
    JSON_TEXT: "hold messages as JSON text, which are read as messages",
    TRIMMED: "have messages whose leading or trailing blanks the chat template leaves out",
    REWRITTEN: "have messages that the chat template leaves out or writes otherwise",
    UNREAD: "have tools, calls or thoughts of which the chat template writes nothing",
    AS_SYSTEM: "have a developer message, which the chat template is given as the system's",
    OPENED: "continue a message that the chat template begins otherwise than it begins an answer",
}
"""What is told of each kind, after the number of prompts."""


class Mark(NamedTuple):
    """Says what is unexpected in one prompt. kind: one of KINDS."""

    kind: str
    what: str


class Marker:
    """Marks the prompts of one tokenizer.

    frame: ids that the tokenizer puts in front of a text and behind it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        names = {i: token.content for i, token in added.items() if token.special}
        names |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self._unknown = tokenizer.unk_token_id
        names.pop(self._unknown, None)
        self.names: Mapping[int, str] = names
        self._plain = not any(token.special and token.normalized for token in added.values())
        self.frame = self._frame()

    def unframed(self, ids: Sequence[int]) -> tuple[list[int], list[Mark]]:
        """Return the prompt of a framed text, and how it is marked.

        Without the end of the frame, which would end the prompt, and with one beginning where the
        text itself starts with it.
        """
        begin, end = self.frame
        found, marks = list(ids[: len(ids) - len(end)]), list[Mark]()
        own = found[len(begin) :]
        if begin and own[: len(begin)] == begin:
            found, own = own, own[len(begin) :]
            marks.append(Mark(BOS_ONCE, f"it begins with {self._named(begin)}"))
        marks += self._special("the prompt holds", own)
        return found, [*marks, *self._odd(found)]

    def templated(self, contents: Sequence[str], ids: Sequence[int]) -> list[Mark]:
        """Return the marks of a chat's ids, which a template has made of its contents."""
        marks: list[Mark] = []
        for number, content in enumerate(contents, start=1):
            if self._plain and not any(name in content for name in self.names.values()):
                continue
            own = self._tokenizer(content, add_special_tokens=False)["input_ids"]
            marks += self._special(f"message {number} holds", own)
        return [*marks[:1], *self._odd(ids)]

    def opens_a_turn(self, text: str) -> bool:
        """Return whether a text holds a special token."""
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return any(i in self.names for i in ids)

    def _special(self, where: str, ids: Sequence[int]) -> list[Mark]:
        found = list(dict.fromkeys(self.names[i] for i in ids if i in self.names))
        if not found:
            return []
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return [Mark(SPECIAL, f"{where} {', '.join(map(_brief, found[:3]))}{more}")]

    def _odd(self, ids: Sequence[int]) -> list[Mark]:
        marks: list[Mark] = []
        bos = self._tokenizer.bos_token_id
        if bos is not None and bos != self._tokenizer.eos_token_id and ids.count(bos) > 1:
            marks.append(Mark(BOS_AGAIN, f"{ids.count(bos)} times {self._named([bos])}"))
        if self._unknown is not None and self._unknown in ids:
            marks.append(Mark(UNKNOWN, f"{ids.count(self._unknown)} of {len(ids)} tokens"))
        return marks

    def _named(self, ids: Sequence[int]) -> str:
        return "".join(self.names.get(i, f"<{i}>") for i in ids)

    def _frame(self) -> tuple[list[int], list[int]]:
        for text in ("What is 2 + 3?", "0", "a"):
            bare = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            whole = self._tokenizer(text, add_special_tokens=True)["input_ids"]
            for start in range(len(whole) - len(bare) + 1) if bare else ():
                if whole[start : start + len(bare)] == bare:
                    return list(whole[:start]), list(whole[start + len(bare) :])
        return [], []


def probe(number: int) -> str:
    """Return the n-th message of a chat that shows what a template does with any, from 0."""
    return f" PROBE{number}. \n"


def changed(chat: Chat, text: str, probed: str | None) -> list[Mark]:
    """Return a mark for the first message of each kind that a rendered chat does not hold as it is.

    text: the chat as rendered. probed: one of the same roles whose messages are probes, by which a
    message that the template always leaves out is told from one whose words stand elsewhere
    too; None: unknown.
    """
    marks: dict[str, Mark] = {}
    for number, message in enumerate(chat):
        content, put = message.content, probe(number)
        if not content:
            continue
        kept = probed is None or put in probed
        if content.strip() not in text or (probed is not None and put.strip() not in probed):
            kind = REWRITTEN
        elif content not in text or (content != content.strip() and not kept):
            kind = TRIMMED
        else:
            continue
        marks.setdefault(
            kind, Mark(kind, f"message {number + 1} ({message.role}), {_brief(content)}")
        )
    return list(marks.values())


def continued(opened: str, content: str, text: str) -> list[Mark]:
    """Return how a continued message is marked. opened: the chat before it, an answer begun.

    text: the chat with the message, which ends with `content` unless the template has trimmed it.
    """
    marks: list[Mark] = []
    written = next(
        (c for c in (content, content.rstrip(), content.strip()) if text.endswith(c)), ""
    )
    if written != content:
        marks.append(Mark(TRIMMED, f"the message to continue, {_brief(content)}"))
    begun = text[: len(text) - len(written)]
    if begun != opened:
        same = alike(begun, opened)
        what = f"the template writes {_brief(begun[same:])} before {_brief(content)}"
        marks.append(Mark(OPENED, f"{what}, an answer begins with {_brief(opened[same:])}"))
    return marks


def alike(one: str, other: str) -> int:
    """Return with how many characters both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _brief(text: str) -> str:
    return shown(text, 60)
