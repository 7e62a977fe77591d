"""Turns rows of a file for fine-tuning into ids of prompts and of their answers.

Invariant: the prompt of a pair is what a run renders of the same text or messages, id by id; its
response is what the student would sample behind it, with the token that ends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_opd.config.sft import SftConfig
from megatron_opd.config.wording import listed, shown
from megatron_opd.data.chats import ASSISTANT, USER, Chat, ChatMessage, chat_like
from megatron_opd.data.end_tokens import read_end_tokens
from megatron_opd.data.faults import Fault, Unusable
from megatron_opd.data.marks import KINDS, Mark
from megatron_opd.data.records import Columns, Record, scan_records
from megatron_opd.data.render import Rendered, Renderer, Rendering
from megatron_opd.data.template import use_template
from megatron_opd.data.unread_columns import unread_columns
from megatron_opd.models.spec import ModelSpec, read_config
from megatron_opd.records.types import IntArray, OffsetArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOT_ENDED, CUT = "not_ended", "cut"
FAULT_TEXTS = {
    **KINDS,
    NOT_ENDED: (
        "have answers that the chat template does not end with an end token of the model, so that "
        "one is put behind them"
    ),
    CUT: "have answers that hold an end token: nothing behind it is learnt, as no response goes on",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Holds one example: prompt tokens, and response tokens with the token that ends them."""

    prompt_ids: IntArray
    response_ids: IntArray

    @property
    def num_tokens(self) -> int:
        """Returns the number of prompt and response tokens together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def ids_S(self) -> IntArray:
        """Returns int32 [S]: prompt and response tokens."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def position_T(self) -> OffsetArray:
        """Returns int64 [T]: where the response tokens lie."""
        return np.arange(len(self.prompt_ids), self.num_tokens)


@dataclass(frozen=True, slots=True)
class PairRules:
    """Says where a row has its examples, and how they become ids.

    messages_key: the column of a chat, each of whose answers is an example; None: a row is one, of
    prompt_key and response_key. end_ids: those that end a response; end_id: the one that is put
    behind a response that has none. max_tokens: of prompt and response together.
    """

    prompt_key: str
    response_key: str
    messages_key: str | None
    rendering: Rendering
    end_ids: frozenset[int]
    end_id: int
    max_tokens: int
    tools_key: str | None = None

    @property
    def columns(self) -> Columns:
        """Returns what is read of a row."""
        tools = self.tools_key if self.rendering.chat_template else None
        if self.messages_key is not None:
            return Columns(chats=(self.messages_key,), tools=tools)
        return Columns(texts=(self.response_key,), chats=(self.prompt_key,), tools=tools)


def pair_rules(
    config: SftConfig, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec, clock: datetime
) -> PairRules:
    """Return how the rows of a configuration become examples, and give the tokenizer its template.

    spec: of the model in config.init. clock: the moment that templates are given. ValueError: no
    template file, or nothing ends a response.
    """
    use_template(tokenizer, config.chat_template)
    how = Rendering(
        bool(config.chat_template), config.system_prompt, config.chat_template_kwargs, clock
    )
    try:
        ends = read_end_tokens(
            config.init,
            read_config(config.init / "config.json"),
            spec.vocab_size,
            tokenizer,
            spec.family.end_token,
        )
    except ValueError as error:
        raise ValueError(f"init: {error}") from None
    keys = config.prompt_key, config.response_key, config.messages_key
    limits = frozenset(ends.ids), ends.written, spec.longest_context
    return PairRules(*keys, how, *limits, config.tools_key)


@dataclass(frozen=True, slots=True)
class PairSet:
    """Holds the examples of a file. notes: what their rows do not tell, a line for each kind."""

    pairs: list[Pair]
    notes: list[str]


def read_pairs(path: Path, tokenizer: PreTrainedTokenizerBase, rules: PairRules) -> PairSet:
    """Read and tokenise a file.

    ValueError, one line: it cannot be read, or a row cannot be used.
    """
    maker = PairMaker(tokenizer, rules)
    pairs: list[Pair] = []
    count, first = Counter[str](), dict[str, str]()
    for row in scan_records(path, rules.columns):
        if isinstance(row, Fault):
            raise ValueError(str(row))
        where, record = row
        try:
            for pair, marks in maker.pairs(record):
                if pair.num_tokens > rules.max_tokens:
                    raise ValueError(
                        f"{where}: prompt and response must fit the model's context of "
                        f"{rules.max_tokens} tokens, got {pair.num_tokens}"
                    )
                pairs.append(pair)
                for kind, what in dict(marks).items():
                    count[kind] += 1
                    first.setdefault(kind, f"{where}: {what}")
        except Unusable as error:
            raise ValueError(str(error.at(where))) from None
    if not pairs:
        raise ValueError(f"{path} holds no rows")
    notes = [
        f"{path}: {count[kind]} of {len(pairs)} examples {FAULT_TEXTS[kind]}; first {first[kind]}"
        for kind in count
    ]
    if names := unread_columns(path, rules.columns.wanted):
        notes.append(f"{path}: no key names the columns {listed(names)}, which are not read")
    return PairSet(pairs, notes)


class PairMaker:
    """Makes the examples of rows with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rules: PairRules) -> None:
        self._tokenizer: Any = tokenizer
        self._rules, self._renderer = rules, Renderer(tokenizer, rules.rendering)

    def pairs(self, record: Record) -> Iterator[tuple[Pair, tuple[Mark, ...]]]:
        """Yield the examples of a row, each with what is unexpected about it. Raises Unusable."""
        rules = self._rules
        if rules.messages_key is not None:
            yield from self._of_chat(record[rules.messages_key])
            return
        prompt, response = record[rules.prompt_key], record[rules.response_key]
        if rules.rendering.chat_template:
            yield self._answer(prompt, ChatMessage(ASSISTANT, response))
        elif isinstance(prompt, str):
            yield self._of_texts(prompt, response)
        else:
            raise Unusable(
                "bad_chat", f"{rules.prompt_key!r} holds messages, which need chat_template: true"
            )

    def _of_chat(self, chat: str | Chat) -> Iterator[tuple[Pair, tuple[Mark, ...]]]:
        key = self._rules.messages_key
        if isinstance(chat, str):
            raise Unusable("wrong_type", f"{key!r} must be a list of messages, got a text")
        asked = [n for n, message in enumerate(chat) if message.role == USER]
        answers = [
            n
            for n, message in enumerate(chat)
            if message.role == ASSISTANT and asked and n > asked[0]
        ]
        if not answers:
            raise Unusable("bad_chat", f"{key!r} has no assistant's message behind a user's")
        for n in answers:
            yield self._answer(chat_like(chat, chat[:n]), chat[n])

    def _answer(self, prompt: str | Chat, message: ChatMessage) -> tuple[Pair, tuple[Mark, ...]]:
        if not isinstance(prompt, str) and prompt[-1].role == ASSISTANT:
            raise Unusable("bad_chat", f"message {len(prompt)}, an answer, is followed by another")
        found = self._renderer.answered(prompt, message)
        if isinstance(found, Unusable):
            raise found
        rendered, answer, behind = found
        response, marks = self._ended(self._ids(answer + behind)), rendered.marks
        marks = (*marks, *self._cut(self._ids(answer.rstrip())))
        if response is None:
            response = [*self._ids(answer + behind.rstrip()), self._rules.end_id]
            closed = _brief(behind.rstrip()) if behind.strip() else "nothing"
            end = self._tokenizer.decode([self._rules.end_id])
            marks = (*marks, Mark(NOT_ENDED, f"{closed} is behind the answer, {end} is added"))
        return _pair(rendered, response), marks

    def _of_texts(self, prompt: str, response: str) -> tuple[Pair, tuple[Mark, ...]]:
        found = self._renderer.render([prompt, prompt + response])
        alone, whole = (each for each in found if isinstance(each, Rendered))
        start = len(alone.ids)
        # tokenizers that begin every text with a blank do not begin a response with it
        together = whole.ids[:start] == alone.ids and len(whole.ids) > start
        ids = whole.ids[start:] if together else self._ids(response)
        answer = self._ended(ids) or [*ids, self._rules.end_id]
        return _pair(alone, answer), (*alone.marks, *self._cut(ids))

    def _cut(self, ids: list[int]) -> tuple[Mark, ...]:
        """Return a mark for an answer that goes on behind an end token."""
        kept = len(self._ended(ids) or ids)
        lost = str(self._tokenizer.decode(ids[kept:]))
        if not lost.strip():
            return ()
        return (Mark(CUT, f"{self._tokenizer.decode(ids[kept - 1 : kept])} before {_brief(lost)}"),)

    def _ended(self, ids: list[int]) -> list[int] | None:
        """Return a response up to its first end token, as a server ends it; None without one."""
        ends = (n for n, i in enumerate(ids, start=1) if i in self._rules.end_ids)
        return next((ids[:n] for n in ends), None)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _pair(prompt: Rendered, response: Sequence[int]) -> Pair:
    return Pair(np.array(prompt.ids, dtype=np.int32), np.array(response, dtype=np.int32))


def _brief(text: str) -> str:
    return shown(text, 60)
