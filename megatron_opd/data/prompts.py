"""Turns the rows of a data file into tokenised prompts, and says what became of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_opd.data.faults import Fault, Unusable
from megatron_opd.data.marks import KINDS
from megatron_opd.data.messages import ASSISTANT, chat_text
from megatron_opd.data.records import Columns, Record, scan_records
from megatron_opd.data.render import Rendered, Renderer, Rendering
from megatron_opd.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOO_LONG = "too_long"
AS_IT_IS = Rendering()
ROWS_AT_ONCE = 256
"""Rows that are read and tokenised together: the tokenizer's own records of a prompt take about a
hundred times as much memory as its text."""

_Faults = dict[str, tuple[int, str]]
"""By cause: how many rows, and the first of them."""


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Says what a row must be to become a prompt.

    columns: see data/records.py; the first of its chats or texts is the prompt, of its answers the
    answer, of its limits the longest response, of its stops what ends one, of its names the row's
    own. teacher_key: the column of `columns.choices` that names a prompt's teacher; None: the only
    one. max_tokens: longest prompt. rendering: how prompts become text. continues: whether a chat
    may end with an assistant's message. max_bad_fraction: share of unusable rows above which the
    file is refused; rows that are only too long do not count. vocab_size: ids of the model.
    """

    columns: Columns
    max_tokens: int
    teacher_key: str | None = None
    rendering: Rendering = AS_IT_IS
    continues: bool = False
    max_bad_fraction: float = 0.0
    vocab_size: int | None = None

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


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Holds the usable prompts of one file, uid = position, and what became of the other rows.

    rows: how many were read; whole: whether that is all of them. skipped: unusable rows by cause.
    first: the first of each cause, located. longest: tokens of the longest prompt read, skipped
    ones included; 0 where nothing was tokenised. unseen: columns that rows may lack and that
    no row has. marked: by kind of mark, how many prompts have it and the first, located.
    """

    path: Path
    prompts: tuple[Prompt, ...]
    rows: int
    whole: bool
    skipped: dict[str, int]
    first: dict[str, str]
    longest: int
    unseen: frozenset[str] = frozenset()
    marked: Mapping[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])

    @property
    def marked_lines(self) -> list[str]:
        """Returns a line for each thing that the ids of prompts and their rows do not share."""
        return [
            f"{self.path}: {count} of {self.rows} prompts {KINDS[kind]}; first {first}"
            for kind, (count, first) in self.marked.items()
        ]

    @property
    def skipped_line(self) -> str | None:
        """Returns a line with count and first row of each cause; None when all rows are usable."""
        if not self.skipped:
            return None
        causes = "; ".join(
            f"{count} {cause.replace('_', ' ')}, first {self.first[cause]}"
            for cause, count in self.skipped.items()
        )
        return f"{self.path}: {sum(self.skipped.values())} of {self.rows} rows skipped: {causes}"


def load_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    rules: PromptRules,
    *,
    first_rows: int | None = None,
) -> PromptSet:
    """Read and tokenise a prompt file; a row that cannot be used is skipped and counted.

    tokenizer: None reads the columns alone. first_rows: read no more, unless too many of them are
    unusable: then all, so that a part of the file never decides alone.
    Raises ValueError (one line) for a file that cannot be read, no usable row, more unusable rows
    than allowed, and a tokenizer or chat template that does not work.
    """
    found = _read(path, tokenizer, rules, first_rows)
    problem = _problem(found, rules)
    if problem is not None and not found.whole:
        found = _read(path, tokenizer, rules, None)
        problem = _problem(found, rules)
    if problem is not None:
        raise ValueError(problem)
    return found


def _read(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    rules: PromptRules,
    first_rows: int | None,
) -> PromptSet:
    scanned = scan_records(path, rules.columns)
    rows = scanned if first_rows is None else islice(scanned, first_rows)
    judged, renderer = _Judged(path, rules), None
    while part := list(islice(rows, ROWS_AT_ONCE)):
        usable = judged.columns_of(part)
        if tokenizer is not None and usable:
            renderer = renderer or Renderer(tokenizer, rules.rendering)
            chats = [record[rules.prompt_key] for _, record in usable]
            judged.take(usable, renderer.render(chats))
    return judged.found(whole=first_rows is None or next(scanned, None) is None)


class _Judged:
    """Collects what became of rows, part by part: all of them at once would fill the memory."""

    def __init__(self, path: Path, rules: PromptRules) -> None:
        self._path, self._rules, columns = path, rules, rules.columns
        self._unseen = {*columns.limits, *columns.stops, *columns.tasks, *columns.weights}
        self._rows, self._longest, self._largest = 0, 0, 0
        self._prompts: list[Prompt] = []
        self._marked: dict[str, tuple[int, str]] = {}
        # those of columns, of what a prompt may be, and of ids, which are told in this order
        self._faults: tuple[_Faults, ...] = ({}, {}, {})

    def columns_of(self, part: Sequence[Fault | tuple[str, Record]]) -> list[tuple[str, Record]]:
        """Return the rows whose columns are a prompt."""
        self._rows += len(part)
        usable: list[tuple[str, Record]] = []
        for row in part:
            if isinstance(row, Fault):
                self._count(0, row)
                continue
            misfit = self._rules.misfit(row[1])
            if misfit is None:
                usable.append(row)
                self._unseen -= {key for key in self._unseen if row[1][key] not in (None, ())}
            else:
                self._count(1, misfit.at(row[0]))
        return usable

    def take(
        self, usable: Sequence[tuple[str, Record]], rendered: Sequence[Rendered | Unusable]
    ) -> None:
        """Take the prompts of rows that have become ids."""
        for (where, record), each in zip(usable, rendered, strict=True):
            if isinstance(each, Unusable):
                self._count(2, each.at(where))
                continue
            self._largest = max(self._largest, max(each.ids, default=0))
            self._longest = max(self._longest, len(each.ids))
            if 0 < len(each.ids) <= self._rules.max_tokens:
                prompt = _prompt(len(self._prompts), where, each.ids, record, self._rules)
                self._prompts.append(prompt)
                for kind, what in dict(each.marks).items():
                    count, first = self._marked.get(kind, (0, f"{where}: {what}"))
                    self._marked[kind] = count + 1, first
            elif each.ids:
                what = f"{len(each.ids)} tokens, the limit is {self._rules.max_tokens}"
                self._count(2, Fault(TOO_LONG, where, what))
            else:
                self._count(2, Fault("empty", where, "the prompt has no tokens"))

    def found(self, *, whole: bool) -> PromptSet:
        """Return all prompts. ValueError: the model does not have their ids."""
        vocab_size = self._rules.vocab_size
        if vocab_size is not None and self._largest >= vocab_size:
            raise ValueError(
                f"{self._path}: the tokenizer gives the id {self._largest}, beyond the model's "
                f"vocab_size {vocab_size}"
            )
        skipped: Counter[str] = Counter()
        first: dict[str, str] = {}
        for faults in self._faults:
            for cause, (count, located) in faults.items():
                skipped[cause] += count
                first.setdefault(cause, located)
        return PromptSet(
            self._path,
            tuple(self._prompts),
            rows=self._rows,
            whole=whole,
            skipped=dict(skipped),
            first=first,
            longest=self._longest,
            unseen=frozenset(self._unseen),
            marked=self._marked,
        )

    def _count(self, stage: int, fault: Fault) -> None:
        count, first = self._faults[stage].get(fault.cause, (0, str(fault)))
        self._faults[stage][fault.cause] = count + 1, first


def _prompt(uid: int, where: str, ids: Sequence[int], record: Record, rules: PromptRules) -> Prompt:
    columns, teacher = rules.columns, rules.teacher_key
    return Prompt(
        uid=uid,
        text=chat_text(record[rules.prompt_key]),
        token_ids_P=np.asarray(ids, dtype=np.int32),
        answer=record[columns.answers[0]] if columns.answers else None,
        teacher="teacher" if teacher is None else str(record[teacher]),
        max_new_tokens=next((record[key] for key in columns.limits), None),
        stop=next((record[key] for key in columns.stops), ()),
        task=next((record[key] for key in columns.tasks), None),
        row_id=next((record[key] for key in columns.names), None) or where,
        reward_weight=_weight(record, columns.reward_weight),
        teacher_weight=_weight(record, columns.teacher_weight),
    )


def _weight(record: Record, key: str | None) -> float:
    weight = None if key is None else record[key]
    return 1.0 if weight is None else weight


def _problem(found: PromptSet, rules: PromptRules) -> str | None:
    """Return why the file is rejected, or None."""
    path, rows = found.path, found.rows
    if rows == 0:
        return f"{path} holds no rows"
    bad = {cause: count for cause, count in found.skipped.items() if cause != TOO_LONG}
    if sum(bad.values()) > rules.max_bad_fraction * rows or sum(bad.values()) == rows:
        causes = "; ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in bad.items())
        where = found.first[next(iter(bad))]
        return (
            f"{path}: {sum(bad.values())} of {rows} rows cannot be used, data.max_bad_fraction "
            f"allows {rules.max_bad_fraction:g} of them: {causes}; first {where}"
        )
    if sum(found.skipped.values()) == rows:
        return (
            f"{path}: all {rows} usable prompts are longer than the limit of {rules.max_tokens} "
            f"tokens, first {found.first[TOO_LONG]}"
        )
    return None
