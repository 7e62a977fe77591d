"""Judges rows of prompts, and counts what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_opd.data.chats import Chat, chat_text, messages_of, tools_of
from megatron_opd.data.faults import Fault, Unusable
from megatron_opd.data.marks import KINDS, Mark
from megatron_opd.data.prompt_rules import NO_TEACHER_PROMPT, PromptRules, TeacherReading
from megatron_opd.data.records import PASSED_ON, Record
from megatron_opd.data.render import Rendered, Renderer
from megatron_opd.records.mixtures import label_of
from megatron_opd.records.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOO_LONG, TEACHER_TOO_LONG = "too_long", "teacher_too_long"
ASKED = 16
"""Prompts of each file that are kept as their teacher reads them."""
SIGMAS = 4.0
"""Standard deviations above max_bad_fraction at which drawn rows refuse their file: by chance that
happens once in 30,000 looks."""

_OF_COLUMNS, _OF_RULES, _OF_IDS = range(3)
"""Kinds of faults, in the order in which they are told."""
_NO_IDS = np.zeros(0, np.int32)


class RowOutcome(NamedTuple):
    """Holds what became of a row.

    record: of a row whose columns are a prompt. ids_P: of the prompt, [P]; none where nothing was
    tokenised. teacher_ids_Q: of the teacher's own, [Q]; None where it has none. marks: what is
    unexpected about either. fault: why the row is not used, and its kind.
    """

    where: str
    record: Record | None = None
    ids_P: npt.NDArray[np.int32] = _NO_IDS
    teacher_ids_Q: npt.NDArray[np.int32] | None = None
    marks: tuple[Mark, ...] = ()
    fault: Fault | None = None
    kind: int = _OF_COLUMNS

    def prompt(self, uid: int, rules: PromptRules) -> Prompt | None:
        """Return the prompt of the row, None for one that is not used or was not tokenised."""
        record, columns = self.record, rules.columns
        if record is None or self.fault is not None or not len(self.ids_P):
            return None
        chat = record[rules.prompt_key] if rules.keeps_chats else ""
        shares = rules.shares_of(record)
        return Prompt(
            uid=uid,
            text=chat_text(record[rules.prompt_key]),
            token_ids_P=self.ids_P,
            answer=record[columns.answers[0]] if columns.answers else None,
            teacher=label_of(shares),
            mixture=shares if len(shares) > 1 else (),
            teacher_ids_Q=self.teacher_ids_Q,
            max_new_tokens=next((record[key] for key in columns.limits), None),
            stop=next((record[key] for key in columns.stops), ()),
            task=next((record[key] for key in columns.tasks), None),
            row_id=next((record[key] for key in columns.names), None) or self.where,
            reward_weight=_weight(record, columns.reward_weight),
            teacher_weight=_weight(record, columns.teacher_weight),
            messages=messages_of(chat),
            tools=tuple(map(dict, tools_of(chat))),
            columns=record.get(PASSED_ON, {}),
        )


class AskedPrompt(NamedTuple):
    """Holds what teachers read of a row, [Q] ids, and the prompt that they were made of."""

    where: str
    teachers: tuple[str, ...]
    prompt: str | Chat
    ids_Q: npt.NDArray[np.int32]


class RowReader:
    """Turns rows into outcomes. tokenizer: None reads the columns alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, rules: PromptRules) -> None:
        self._tokenizer, self._rules = tokenizer, rules
        self._renderers: dict[str | None, Renderer] = {}
        """By the name of the teacher whose own reading it is; None: the student's"""

    def read(self, rows: Sequence[Fault | tuple[str, Record]]) -> list[RowOutcome]:
        """Return what becomes of each row. ValueError: the tokenizer or its template fails."""
        found = [self._judged(row) for row in rows]
        usable = [n for n, each in enumerate(found) if each.fault is None]
        if self._tokenizer is None or not usable:
            return found
        rules, records = self._rules, {n: found[n].record or {} for n in usable}
        prompts = {n: record[rules.prompt_key] for n, record in records.items()}
        for n, each in self._rendered(None, prompts):
            found[n] = self._tokenised(found[n], each)
        asked: dict[str | None, dict[int, str | Chat]] = {}
        for n, record in records.items():
            reads = rules.teacher_reads(record)
            if reads is not None and found[n].fault is None:
                name = rules.teacher_of(record)
                reader = name if name in rules.readings else None
                asked.setdefault(reader, {})[n] = record[reads[0]]
        for reader, prompts in asked.items():
            for n, each in self._rendered(reader, prompts):
                found[n] = self._of_teacher(found[n], each, rules.readings.get(reader or ""))
        return found

    def _rendered(
        self, reader: str | None, prompts: Mapping[int, str | Chat]
    ) -> Iterable[tuple[int, Rendered | Unusable]]:
        """Return the ids of prompts as the student reads them, or one teacher."""
        assert self._tokenizer is not None
        if reader not in self._renderers:
            own = None if reader is None else self._rules.readings[reader]
            tokenizer = self._tokenizer if own is None else own.tokenizer
            how = self._rules.rendering if own is None else own.rendering
            self._renderers[reader] = Renderer(tokenizer, how)
        return zip(prompts, self._renderers[reader].render(list(prompts.values())), strict=True)

    def _judged(self, row: Fault | tuple[str, Record]) -> RowOutcome:
        if isinstance(row, Fault):
            return RowOutcome(row.where, fault=row)
        where, record = row
        misfit = self._rules.misfit(record)
        if misfit is None:
            return RowOutcome(where, record)
        return RowOutcome(where, fault=misfit.at(where), kind=_OF_RULES)

    def _tokenised(self, row: RowOutcome, found: Rendered | Unusable) -> RowOutcome:
        if isinstance(found, Unusable):
            return row._replace(fault=found.at(row.where), kind=_OF_IDS)
        ids_P, fault = np.asarray(found.ids, dtype=np.int32), None
        if not found.ids:
            fault = Fault("empty", row.where, "the prompt has no tokens")
        elif len(found.ids) > self._rules.max_tokens:
            what = f"{len(found.ids)} tokens, the limit is {self._rules.max_tokens}"
            fault = Fault(TOO_LONG, row.where, what)
        marks = found.marks if fault is None else ()
        return row._replace(ids_P=ids_P, marks=marks, fault=fault, kind=_OF_IDS)

    def _of_teacher(
        self, row: RowOutcome, found: Rendered | Unusable, own: TeacherReading | None
    ) -> RowOutcome:
        if isinstance(found, Unusable):
            return row._replace(fault=found.at(row.where), kind=_OF_IDS)
        most = self._rules.max_teacher_tokens
        if not 0 < len(found.ids) <= most:
            what = f"the teacher's prompt has {len(found.ids)} tokens, the limit is {most}"
            fault = Fault(TEACHER_TOO_LONG if found.ids else "empty", row.where, what)
            return row._replace(fault=fault, kind=_OF_IDS)
        ids_Q = np.asarray(found.ids, dtype=np.int32)
        if own is not None and ids_Q.max() >= own.vocab_size:
            raise ValueError(
                f"{own.rendering.model_key}: its tokenizer gives the id {ids_Q.max()}, beyond the "
                f"model's vocab_size {own.vocab_size}"
            )
        return row._replace(teacher_ids_Q=ids_Q, marks=(*row.marks, *found.marks))


class RowTally:
    """Counts what became of the rows of a file.

    watched: texts to look for among its prompts.

    rows: how many were judged. longest: tokens of the longest prompt, skipped ones included; 0
    where nothing was tokenised. unhinted: rows without a prompt of the teacher's own, the first of
    which is unhinted_at. unseen: columns that rows may lack and that no row has. marked: by kind of
    mark, how many prompts have it and the first, located. met: the watched texts that it
    has. asked: what teachers read of the first prompts.
    """

    def __init__(self, path: Path, rules: PromptRules, watched: Collection[str] = ()) -> None:
        self._path, self._rules, self._watched = path, rules, watched
        columns = rules.columns
        self.unseen = {*columns.limits, *columns.stops, *columns.tasks, *columns.weights}
        self.unseen |= {*columns.passed_on}
        self.unseen |= set() if columns.teacher_prompt is None else {columns.teacher_prompt}
        self.rows, self.longest, self.unhinted, self._largest = 0, 0, 0, 0
        self.unhinted_at = ""
        self.marked: dict[str, tuple[int, str]] = {}
        self.met, self.asked = set[str](), list[AskedPrompt]()
        self._faults: tuple[dict[str, tuple[int, str]], ...] = ({}, {}, {})

    def add(self, row: RowOutcome) -> None:
        """Count a row."""
        self.rows += 1
        self.longest = max(self.longest, len(row.ids_P))
        # those of a teacher with a tokenizer of its own are judged where they are made
        read = row.teacher_ids_Q if row.record and self._alike(row.record) else None
        for ids in (row.ids_P, read):
            self._largest = max(self._largest, 0 if ids is None else int(ids.max(initial=0)))
        if row.record is not None:
            record = row.record
            known = record.get(PASSED_ON, {}) | record
            self.unseen -= {key for key in self.unseen if known[key] not in (None, ())}
            own = self._rules.columns.teacher_prompt
            if own is not None and row.fault is None and record[own] is None:
                self.unhinted += 1
                self.unhinted_at = self.unhinted_at or row.where
            if row.fault is None and len(row.ids_P) and len(self.asked) < ASKED:
                self.asked.append(self._asked(row, record))
            if self._watched and row.fault is None:
                self.met |= {chat_text(record[self._rules.prompt_key])}.intersection(self._watched)
        if row.fault is not None:
            count, first = self._faults[row.kind].get(row.fault.cause, (0, str(row.fault)))
            self._faults[row.kind][row.fault.cause] = count + 1, first
        for kind, what in dict(row.marks).items():
            count, first = self.marked.get(kind, (0, f"{row.where}: {what}"))
            self.marked[kind] = count + 1, first

    def _asked(self, row: RowOutcome, record: Record) -> AskedPrompt:
        reads, own_Q = self._rules.teacher_reads(record), row.teacher_ids_Q
        prompt = record[self._rules.prompt_key if reads is None else reads[0]]
        ids_Q = row.ids_P if own_Q is None else own_Q
        teachers = tuple(name for name, _ in self._rules.shares_of(record))
        return AskedPrompt(row.where, teachers, prompt, ids_Q)

    def _alike(self, record: Record) -> bool:
        """Return whether a row's teacher reads with the student's tokenizer."""
        return self._rules.teacher_of(record) not in self._rules.readings

    @property
    def skipped(self) -> dict[str, int]:
        """Returns how many rows are not used, by cause."""
        counts: Counter[str] = Counter()
        for faults in self._faults:
            for cause, (count, _) in faults.items():
                counts[cause] += count
        return dict(counts)

    def first(self, cause: str) -> str:
        """Return the first row of a cause, located."""
        return next(faults[cause][1] for faults in self._faults if cause in faults)

    @property
    def marked_lines(self) -> list[str]:
        """Returns a line for each thing that the ids of prompts and their rows do not share."""
        return [
            f"{self._path}: {count} of {self.rows} prompts {KINDS[kind]}; first {first}"
            for kind, (count, first) in self.marked.items()
        ]

    @property
    def skipped_line(self) -> str | None:
        """Returns a line with count and first row of each cause; None when all rows are usable."""
        skipped = self.skipped
        if not skipped:
            return None
        causes = "; ".join(
            f"{count} {cause.replace('_', ' ')}, first {self.first(cause)}"
            for cause, count in skipped.items()
        )
        return f"{self._path}: {sum(skipped.values())} of {self.rows} rows skipped: {causes}"

    def problem(self, *, sampled: bool = False) -> str | None:
        """Return why the file is rejected, or None.

        sampled: the rows speak for others too: more are bad than allowed only beyond chance.
        """
        path, rows, rules = self._path, self.rows, self._rules
        if rules.vocab_size is not None and self._largest >= rules.vocab_size:
            return (
                f"{path}: the tokenizer gives the id {self._largest}, beyond the model's "
                f"vocab_size {rules.vocab_size}"
            )
        if rows == 0:
            return f"{path} holds no rows"
        skipped = self.skipped
        long = (TOO_LONG, TEACHER_TOO_LONG)
        asked = (*long, NO_TEACHER_PROMPT)  # not the file's fault
        bad = {cause: count for cause, count in skipped.items() if cause not in asked}
        allowed = rules.max_bad_fraction * rows
        limit = allowed + SIGMAS * sqrt(allowed) if sampled else allowed
        if sum(bad.values()) > limit or sum(bad.values()) == rows:
            causes = "; ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in bad.items())
            where = self.first(next(iter(bad)))
            judged = "rows read so far" if sampled else "rows"
            return (
                f"{path}: {sum(bad.values())} of {rows} {judged} cannot be used, "
                f"data.max_bad_fraction allows {rules.max_bad_fraction:g} of them: {causes}; "
                f"first {where}"
            )
        if sum(skipped.values()) == rows and NO_TEACHER_PROMPT in skipped:
            where = self.first(NO_TEACHER_PROMPT)
            return f"{path}: none of {rows} rows has a prompt for its teacher, first {where}"
        if sum(skipped.values()) == rows:
            which = next(cause for cause in long if cause in skipped)
            most = rules.max_tokens if which == TOO_LONG else rules.max_teacher_tokens
            return (
                f"{path}: all {rows} usable prompts are longer than the limit of {most} tokens, "
                f"first {self.first(which)}"
            )
        return None


def _weight(record: Record, key: str | None) -> float:
    weight = None if key is None else record[key]
    return 1.0 if weight is None else weight
