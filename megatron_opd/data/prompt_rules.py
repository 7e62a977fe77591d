"""Says what a row of a data file must be to become a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_opd.data.chats import ASSISTANT
from megatron_opd.data.faults import Unusable
from megatron_opd.data.records import Columns, Record
from megatron_opd.data.render import Rendering

AS_IT_IS = Rendering()


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Says what a row must be to become a prompt.

    columns: see data/records.py; the first of its chats or texts is the prompt, of its answers the
    answer, of its limits the longest response, of its stops what ends one, of its names the row's
    own. teacher_key: the column of `columns.choices` that names a prompt's teacher; None: the only
    one. max_tokens: longest prompt. rendering: how prompts become text. continues: whether a chat
    may end with an assistant's message. max_bad_fraction: share of unusable rows above which the
    file is refused; rows that are only too long do not count. vocab_size: ids of the model.
    keeps_chats: prompts hold the messages and tools of their rows, for an environment.
    """

    columns: Columns
    max_tokens: int
    teacher_key: str | None = None
    rendering: Rendering = AS_IT_IS
    continues: bool = False
    max_bad_fraction: float = 0.0
    vocab_size: int | None = None
    keeps_chats: bool = False

    @property
    def prompt_key(self) -> str:
        """Returns the column that holds the prompt."""
        return (*self.columns.chats, *self.columns.texts)[0]

    def misfit(self, record: Record) -> Unusable | None:
        """Return why the prompt of a record cannot be rendered by these rules, or None."""
        prompt, key = record[self.prompt_key], self.prompt_key
        if isinstance(prompt, str):
            return None
        if not self.rendering.chat_template:
            return Unusable(
                "bad_chat", f"{key!r} holds messages, which need data.chat_template: true"
            )
        if prompt[-1].role == ASSISTANT and not self.continues:
            return Unusable(
                "bad_chat",
                f"the last message of {key!r} is the assistant's; to let the model continue it: "
                "data.continue_assistant: true",
            )
        return None
