"""Says what a row of a data file must be to become a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_opd.data.chats import ASSISTANT, Chat
from megatron_opd.data.faults import Unusable
from megatron_opd.data.records import Columns, Record
from megatron_opd.data.render import Rendering
from megatron_opd.records.mixtures import Shares, label_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AS_IT_IS = Rendering()
ONE_TEACHER: Shares = (("teacher", 1.0),)
NO_TEACHER_PROMPT = "no_teacher_prompt"
"""Cause of rows that are left out because nothing is there for their teacher to read."""


@dataclass(frozen=True, slots=True)
class TeacherReading:
    """Says how a teacher's prompts become ids, where not as the student's do.

    tokenizer: of the teacher, with the template of rendering. vocab_size: ids of its model.
    """

    tokenizer: PreTrainedTokenizerBase
    rendering: Rendering
    vocab_size: int


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Says what a row must be to become a prompt.

    columns: see data/records.py; the first of its chats or texts is the prompt, of its answers the
    answer, of its limits the longest response, of its stops what ends one, of its names the row's
    own. teacher_key: the column of `columns.teachers` that says who scores a prompt; None: `shares`
    do. max_tokens: longest prompt; max_teacher_tokens: longest of a teacher's own. hinted: whether
    a row without one of those cannot be used. rendering: how prompts become text. continues:
    whether a chat may end with an assistant's message. max_bad_fraction: share of unusable rows
    above which the file is refused; rows that are only too long do not count. vocab_size: ids of
    the model. keeps_chats: prompts hold the messages and tools of their rows, for an environment.
    readings: of the teachers that read otherwise than the student, by name.
    """

    columns: Columns
    max_tokens: int
    max_teacher_tokens: int = 0
    hinted: bool = False
    teacher_key: str | None = None
    rendering: Rendering = AS_IT_IS
    continues: bool = False
    max_bad_fraction: float = 0.0
    vocab_size: int | None = None
    keeps_chats: bool = False
    readings: Mapping[str, TeacherReading] = field(default_factory=dict[str, TeacherReading])
    shares: Shares = ONE_TEACHER

    @property
    def prompt_key(self) -> str:
        """Returns the column that holds the prompt."""
        return (*self.columns.chats, *self.columns.texts)[0]

    def shares_of(self, record: Record) -> Shares:
        """Return which teachers score a row's responses, with their weights."""
        return self.shares if self.teacher_key is None else record[self.teacher_key]

    def teacher_of(self, record: Record) -> str:
        """Return the name of the teacher, or of the mixture, that scores a row's responses."""
        return label_of(self.shares_of(record))

    def teacher_reads(self, record: Record) -> tuple[str, Rendering] | None:
        """Return the column that a row's teacher reads, and how; None: as the student does."""
        own, reading = self.columns.teacher_prompt, self.readings.get(self.teacher_of(record))
        hinted = own is not None and record[own] is not None
        if not hinted and reading is None:
            return None
        rendering = self.rendering if reading is None else reading.rendering
        return (own if own is not None and hinted else self.prompt_key), rendering

    def misfit(self, record: Record) -> Unusable | None:
        """Return why the prompt of a record cannot be rendered by these rules, or None."""
        own = self.columns.teacher_prompt
        if self.hinted and own is not None and record[own] is None:
            return Unusable(NO_TEACHER_PROMPT, f"{own!r} is missing, null or blank")
        mixed = [name for name, _ in self.shares_of(record)]
        reader = next((name for name in mixed if name in self.readings), None)
        if reader is not None and len(mixed) > 1:
            return Unusable(
                "bad_mixture",
                f"teacher {reader} reads prompts of its own, those of a mixture must read the same",
            )
        reads = self.teacher_reads(record)
        asked = [(self.prompt_key, self.rendering), *([] if reads is None else [reads])]
        found = (self._misfit_of(key, record[key], how) for key, how in asked)
        return next((each for each in found if each is not None), None)

    def _misfit_of(self, key: str, prompt: str | Chat, how: Rendering) -> Unusable | None:
        if isinstance(prompt, str):
            return None
        if not how.chat_template:
            return Unusable("bad_chat", f"{key!r} holds messages, which need {how.key}: true")
        if prompt[-1].role == ASSISTANT and not self.continues:
            return Unusable(
                "bad_chat",
                f"the last message of {key!r} is the assistant's; to let the model continue it: "
                "data.continue_assistant: true",
            )
        return None
