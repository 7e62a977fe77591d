"""Turns the rows of data files into records of checked columns.

Invariant: a row is a record whose columns are what was asked for, or a `Fault` that says why it
cannot be used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_opd.data.faults import Fault, Unusable
from megatron_opd.data.files import located_rows
from megatron_opd.data.lines import Located
from megatron_opd.data.messages import read_chat, read_other_chat
from megatron_opd.data.values import (
    read_answer,
    read_limit,
    read_name,
    read_plain,
    read_stops,
    read_task,
    read_teachers,
    read_text,
    read_weight,
)

Record = dict[str, Any]
PASSED_ON = "\0passed on"
"""Where a record has the columns that are passed on as they are: no column is called so."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Says which columns to read, and what they must hold.

    texts: non-empty strings. chats: texts, or lists of messages. teacher_prompt: as chats, None
    where missing, null or blank. tools: what comes with either.
    teachers: names of teachers, or mixtures of them, and the names there are; mixes: whether one
    may have several teachers. answers: strings, finite numbers and dates (which
    become text), or lists of them, None where missing, null or blank. needed: whether a row without
    an answer is a fault. A row may lack the others: limits are whole numbers and the most they may
    be, stops are texts or lists of texts, names are texts or numbers, tasks are texts, and the
    verifier that each of their values means; passed_on hold what JSON has, and may be columns that
    are read otherwise too. reward_weight, teacher_weight: finite numbers >= 0,
    None where missing or null, which is 1; not both are 0, and a row of reward weight 0 needs no
    answer.
    """

    texts: Sequence[str] = ()
    answers: Sequence[str] = ()
    needed: bool = False
    teachers: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    mixes: bool = True
    chats: Sequence[str] = ()
    teacher_prompt: str | None = None
    tools: str | None = None
    limits: Mapping[str, int] = field(default_factory=dict[str, int])
    stops: Sequence[str] = ()
    names: Sequence[str] = ()
    tasks: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    passed_on: Sequence[str] = ()
    reward_weight: str | None = None
    teacher_weight: str | None = None

    @property
    def required(self) -> tuple[str, ...]:
        """Returns the columns that a row must have."""
        answers = self.answers if self.needed and self.reward_weight is None else ()
        return (*self.texts, *self.chats, *self.teachers, *answers)

    @property
    def weights(self) -> tuple[str, ...]:
        """Returns the columns of weights."""
        return tuple(key for key in (self.reward_weight, self.teacher_weight) if key is not None)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Returns the columns that hold numbers."""
        return (*self.limits, *self.weights)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Returns all columns that are read, each once."""
        optional = (*self.answers, *self.limits, *self.stops, *self.names, *self.tasks)
        optional += tuple(key for key in (self.teacher_prompt, self.tools) if key is not None)
        return tuple(dict.fromkeys((*self.required, *optional, *self.weights, *self.passed_on)))

    def record(self, row: Mapping[str, Any]) -> Record:
        """Return the named columns of `row`; raises Unusable."""
        record: Record = {key: read_text(row, key) for key in self.texts}
        record |= {key: read_chat(row, key, self.tools) for key in self.chats}
        if self.teacher_prompt is not None:
            key = self.teacher_prompt
            record[key] = read_other_chat(row, key, self.tools)
        record |= {
            key: read_teachers(row, key, allowed, mixes=self.mixes)
            for key, allowed in self.teachers.items()
        }
        weights = {key: read_weight(row, key) for key in self.weights}
        if len(weights) == 2 and all(weight == 0 for weight in weights.values()):
            raise Unusable("no_weight", f"{' and '.join(map(repr, weights))} are both 0")
        needed = self.needed and weights.get(self.reward_weight or "") != 0
        record |= weights | {key: read_answer(row, key, needed=needed) for key in self.answers}
        record |= {key: read_limit(row, key, most) for key, most in self.limits.items()}
        record |= {key: read_stops(row, key) for key in self.stops}
        record |= {key: read_task(row, key, meant) for key, meant in self.tasks.items()}
        if self.passed_on:
            record[PASSED_ON] = {key: read_plain(row, key) for key in self.passed_on}
        return record | {key: read_name(row, key) for key in self.names}

    def checked(self, row: Located | Fault) -> tuple[str, Record] | Fault:
        """Return (where, record) of a row, or its fault."""
        if isinstance(row, Fault):
            return row
        where, values = row
        try:
            return where, self.record(values)
        except Unusable as error:
            return error.at(where)


def scan_records(path: Path, columns: Columns) -> Iterator[tuple[str, Record] | Fault]:
    """Return (file:line, record) or the fault of every row. Blank JSONL lines are not rows.

    path: see located_rows. Raises ValueError (one line) for what cannot be read at all.
    """
    rows = located_rows(path, columns.wanted, columns.required, columns.numbers)
    return (columns.checked(row) for row in rows)


def read_records(path: Path, texts: Sequence[str]) -> list[dict[str, str]]:
    """Return the columns `texts` of every row.

    ValueError names the first row that is not usable.
    """
    records: list[dict[str, str]] = []
    for row in scan_records(path, Columns(texts)):
        if isinstance(row, Fault):
            raise ValueError(str(row))
        records.append({key: str(value) for key, value in row[1].items()})
    if not records:
        raise ValueError(f"{path} holds no rows")
    return records
