"""Turns prompt files into tokenised prompts and those into an endless stream.

Invariant: the n-th prompt of a stream depends only on the file, the seed and n, so that a stream
resumed at a cursor continues exactly where the first one stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_opd.data.records import Columns, Fault, Record, scan_records
from megatron_opd.data.render import render_prompts
from megatron_opd.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOO_LONG = "too_long"


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Says what a row must be to become a prompt.

    columns: see data/records.py; the first of its texts is the prompt, the first of its answers the
    answer. teacher_key: the column of `columns.choices` that names a prompt's teacher; None: the
    only one. max_tokens: longest prompt. chat_template: wrap each prompt as one user message and
    open the assistant's turn. max_bad_fraction: share of unusable rows above which the file is
    refused; rows that are only too long do not count. vocab_size: ids of the model.
    """

    columns: Columns
    max_tokens: int
    teacher_key: str | None = None
    chat_template: bool = False
    max_bad_fraction: float = 0.0
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Holds the usable prompts of one file, uid = position, and what became of the other rows.

    rows: how many were read; whole: whether that is all of them. skipped: unusable rows by cause.
    first: the first of each cause, located. longest: tokens of the longest prompt read, skipped
    ones included; 0 where nothing was tokenised.
    """

    path: Path
    prompts: tuple[Prompt, ...]
    rows: int
    whole: bool
    skipped: dict[str, int]
    first: dict[str, str]
    longest: int

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
    rows = list(scanned if first_rows is None else islice(scanned, first_rows))
    whole = first_rows is None or next(scanned, None) is None
    faults = [row for row in rows if isinstance(row, Fault)]
    usable = [row for row in rows if not isinstance(row, Fault)]
    longest = 0
    prompts: list[Prompt] = []
    if tokenizer is not None:
        texts = [str(record[rules.columns.texts[0]]) for _, record in usable]
        token_ids = render_prompts(texts, tokenizer, chat_template=rules.chat_template)
        _check_ids(path, token_ids, rules.vocab_size)
        longest = max(map(len, token_ids), default=0)
        for (where, record), text, ids in zip(usable, texts, token_ids, strict=True):
            if 0 < len(ids) <= rules.max_tokens:
                prompts.append(_prompt(len(prompts), text, ids, record, rules))
            elif ids:
                what = f"{len(ids)} tokens, the limit is {rules.max_tokens}"
                faults.append(Fault(TOO_LONG, where, what))
            else:
                faults.append(Fault("empty", where, "the prompt has no tokens"))
    return PromptSet(
        path,
        tuple(prompts),
        rows=len(rows),
        whole=whole,
        skipped=dict(Counter(fault.cause for fault in faults)),
        first={fault.cause: str(fault) for fault in reversed(faults)},
        longest=longest,
    )


def _prompt(uid: int, text: str, ids: Sequence[int], record: Record, rules: PromptRules) -> Prompt:
    columns, teacher = rules.columns, rules.teacher_key
    answers = columns.answers
    return Prompt(
        uid=uid,
        text=text,
        token_ids_P=np.asarray(ids, dtype=np.int32),
        answer=record[answers[0]] if answers else None,
        teacher="teacher" if teacher is None else str(record[teacher]),
        reward_weight=_weight(record, columns.reward_weight),
        teacher_weight=_weight(record, columns.teacher_weight),
    )


def _weight(record: Record, key: str | None) -> float:
    return 1.0 if key is None else float(str(record[key]))


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


def _check_ids(path: Path, token_ids: Sequence[Sequence[int]], vocab_size: int | None) -> None:
    largest = max((max(ids) for ids in token_ids if ids), default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"{path}: the tokenizer gives the id {largest}, beyond the model's vocab_size "
            f"{vocab_size}"
        )


class PromptSource:
    """Streams prompts without end, epoch after epoch, each epoch in an order of its own.

    Every prompt is given out `group_size` times in a row: uid // group_size is its group. `cursor`
    is the number given out so far, and the uid of the next one; a source built with that cursor
    continues the stream. With `shuffle` the order of epoch e is a permutation seeded by (seed, e);
    without, every epoch is in file order.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool = True,
        group_size: int = 1,
        cursor: int = 0,
    ) -> None:
        if not prompts:
            raise ValueError("a prompt source needs at least one prompt, got none")
        if cursor < 0:
            raise ValueError(f"cursor must be >= 0, got {cursor}")
        if group_size < 1:
            raise ValueError(f"group_size must be >= 1, got {group_size}")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._group_size = group_size
        self.cursor = cursor
        self._order = self._order_of(self.epoch)

    def at(self, cursor: int) -> PromptSource:
        """Return a source of the same stream that continues at `cursor`."""
        return PromptSource(
            self._prompts,
            seed=self._seed,
            shuffle=self._shuffle,
            group_size=self._group_size,
            cursor=cursor,
        )

    @property
    def epoch(self) -> int:
        """Returns the number of completed passes over the data."""
        return self.cursor // (self._group_size * len(self._prompts))

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._prompts)).tolist()

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        group, member = divmod(self.cursor, self._group_size)
        epoch, position = divmod(group, len(self._prompts))
        if position == member == 0:
            self._order = self._order_of(epoch)
        row = self._order[position]
        prompt = replace(self._prompts[row], uid=self.cursor, row=row)
        self.cursor += 1
        return prompt
