"""Turns rows of a file for fine-tuning into examples: ids, and which of them are learnt.

Invariant: the prompt of an example is what a run renders of the same text or messages, id by id;
its response is what the student would sample behind it, with the token that ends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_opd.config.sft import LossOn, SftConfig
from megatron_opd.config.wording import listed
from megatron_opd.data.answers import (
    CUT,
    NOT_ENDED,
    AnswerEncoder,
    Example,
    MarkedExample,
    one_answer,
)
from megatron_opd.data.chat_examples import SPELT, ChatExamples, followed_by_another
from megatron_opd.data.chats import ASSISTANT, Chat, ChatMessage
from megatron_opd.data.end_tokens import read_end_tokens
from megatron_opd.data.faults import Fault, Unusable
from megatron_opd.data.literal import LiteralEncoder
from megatron_opd.data.marks import KINDS
from megatron_opd.data.records import Columns, Record, scan_records
from megatron_opd.data.render import Rendered, Renderer, Rendering
from megatron_opd.data.template import use_template
from megatron_opd.data.unread_columns import unread_columns
from megatron_opd.models.spec import ModelSpec, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAULT_TEXTS = {
    **KINDS,
    NOT_ENDED: (
        "have answers that the chat template does not end with an end token of the model, so that "
        "one is put behind them"
    ),
    CUT: "have answers that hold an end token: nothing behind it is learnt, as no response goes on",
    SPELT: "have messages that spell control tokens, which are encoded as the characters they are",
}


@dataclass(frozen=True, slots=True)
class ExampleRules:
    """Says where a row has its examples, and how they become ids.

    messages_key: the column of whole chats; None: a row is an example, of prompt_key and
    response_key. loss_on: which answers of a chat are learnt. end_ids: those that end a response;
    end_id: the one that is put behind a response that has none. max_tokens: of an example.
    """

    prompt_key: str
    response_key: str
    messages_key: str | None
    rendering: Rendering
    end_ids: frozenset[int]
    end_id: int
    max_tokens: int
    tools_key: str | None = None
    loss_on: LossOn = "all"

    @property
    def columns(self) -> Columns:
        """Returns what is read of a row."""
        tools = self.tools_key if self.rendering.chat_template else None
        if self.messages_key is not None:
            return Columns(chats=(self.messages_key,), tools=tools)
        return Columns(texts=(self.response_key,), chats=(self.prompt_key,), tools=tools)


def example_rules(
    config: SftConfig, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec, clock: datetime
) -> ExampleRules:
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
    return ExampleRules(*keys, how, *limits, config.tools_key, config.loss_on)


@dataclass(frozen=True, slots=True)
class ExampleSet:
    """Holds the examples of a file. notes: what their rows do not tell, a line for each kind."""

    examples: list[Example]
    notes: list[str]


def read_examples(
    path: Path, tokenizer: PreTrainedTokenizerBase, rules: ExampleRules
) -> ExampleSet:
    """Read and tokenise a file.

    ValueError, one line: it cannot be read, or a row cannot be used.
    """
    maker = ExampleMaker(tokenizer, rules)
    examples: list[Example] = []
    count, first = Counter[str](), dict[str, str]()
    for row in scan_records(path, rules.columns):
        if isinstance(row, Fault):
            raise ValueError(str(row))
        where, record = row
        try:
            for example, marks in maker.examples(record):
                if example.num_tokens > rules.max_tokens:
                    raise ValueError(
                        f"{where}: prompt and response must fit the model's context of "
                        f"{rules.max_tokens} tokens, got {example.num_tokens}"
                    )
                examples.append(example)
                for kind, what in dict(marks).items():
                    count[kind] += 1
                    first.setdefault(kind, f"{where}: {what}")
        except Unusable as error:
            raise ValueError(str(error.at(where))) from None
    if not examples:
        raise ValueError(f"{path} holds no rows")
    notes = [
        f"{path}: {number} of {len(examples)} examples {FAULT_TEXTS[kind]}; first {first[kind]}"
        for kind, number in count.items()
    ]
    if names := unread_columns(path, rules.columns.wanted):
        notes.append(f"{path}: no key names the columns {listed(names)}, which are not read")
    return ExampleSet(examples, notes)


class ExampleMaker:
    """Makes the examples of rows with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rules: ExampleRules) -> None:
        self._tokenizer: Any = tokenizer
        self._rules, self._answers = rules, AnswerEncoder(tokenizer, rules.end_ids, rules.end_id)
        literal = None if rules.messages_key is None else LiteralEncoder(tokenizer)
        self._renderer = Renderer(tokenizer, rules.rendering, literal)
        self._chats = (
            None if literal is None else ChatExamples(self._renderer, literal, self._answers)
        )

    def examples(self, record: Record) -> Iterator[MarkedExample]:
        """Yield the examples of a row, each with what is unexpected about it. Raises Unusable."""
        rules = self._rules
        if rules.messages_key is not None and self._chats is not None:
            yield from self._chats.of(record[rules.messages_key], rules.messages_key, rules.loss_on)
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

    def _answer(self, prompt: str | Chat, message: ChatMessage) -> MarkedExample:
        if not isinstance(prompt, str) and prompt[-1].role == ASSISTANT:
            raise followed_by_another(len(prompt))
        found = self._renderer.answered(prompt, message)
        if isinstance(found, Unusable):
            raise found
        response, marks = self._answers.encoded(found.text, found.behind)
        return one_answer(found.prompt, response), (*found.marks, *marks)

    def _of_texts(self, prompt: str, response: str) -> MarkedExample:
        found = self._renderer.render([prompt, prompt + response])
        alone, whole = (each for each in found if isinstance(each, Rendered))
        start = len(alone.ids)
        # tokenizers that begin every text with a blank do not begin a response with it
        together = whole.ids[:start] == alone.ids and len(whole.ids) > start
        ids = whole.ids[start:] if together else self._answers.ids(response)
        answer = self._answers.ended(ids) or [*ids, self._rules.end_id]
        return one_answer(alone.ids, answer), (*alone.marks, *self._answers.cut(ids))
