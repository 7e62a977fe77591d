"""Turns the rows of a data file into tokenised prompts, and says what became of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_opd.data.drawn import RowPrompts
from megatron_opd.data.files import Rows, open_rows
from megatron_opd.data.outcomes import RowReader, RowTally
from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.data.stream import Prompts
from megatron_opd.records.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_AT_ONCE = 256
"""Rows that are read and tokenised together: the tokenizer's own records of a prompt take about a
hundred times as much memory as its text."""
WHOLE_BYTES = 64 * 2**20
"""Data, unpacked, above which rows are read when they are drawn: as prompts in memory they would
take some eight times as much."""
SAMPLE_ROWS, SAMPLE_BYTES = 256, 8 * 2**20
"""Most rows, and about the most bytes, that are judged before those of a large file are drawn."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Holds the prompts of one file, and what became of its rows.

    prompts: those that can be used, uid = position; of a file whose rows are read when they are
    drawn, one for every row. tally: of the rows judged so far. whole: whether those are all.
    examples: of prompts.
    """

    path: Path
    prompts: Prompts
    tally: RowTally
    whole: bool
    examples: tuple[Prompt, ...]

    @property
    def drawn(self) -> RowPrompts | None:
        """Returns the rows that are read when they are drawn; None: all were read before."""
        return self.prompts if isinstance(self.prompts, RowPrompts) else None

    @property
    def counted(self) -> bool:
        """Returns whether the number of prompts is known, and not 0."""
        return len(self.prompts) > 0 and (self.whole or self.drawn is not None)


@dataclass(frozen=True, slots=True)
class PromptFile:
    """Holds the rows of a prompt file, opened. watched: texts to look for among its prompts."""

    path: Path
    rules: PromptRules
    rows: Rows
    watched: Collection[str] = ()

    @staticmethod
    def open(path: Path, rules: PromptRules, watched: Collection[str] = ()) -> PromptFile:
        """Find the rows of a data path. ValueError (one line): it cannot be read."""
        columns = rules.columns
        rows = open_rows(path, columns.wanted, columns.required, columns.numbers)
        return PromptFile(path, rules, rows, watched)

    def loaded(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        first_rows: int | None = None,
        first_prompts: int | None = None,
    ) -> PromptSet:
        """Read and tokenise all prompts; a row that cannot be used is skipped and counted.

        tokenizer: None reads the columns alone. first_rows, first_prompts: read no more, unless too
        many of the rows are unusable: then all, so that a part of the file never decides alone.
        ValueError (one line): no usable row, more unusable ones than allowed, ids that the model
        does not have, and a tokenizer or chat template that does not work.
        """
        every = range(len(self.rows))
        found = self._read(tokenizer, every[:first_rows], first_prompts, stop=True)
        if found.tally.problem() is not None and not found.whole:
            found = self._read(tokenizer, every, first_prompts)
        problem = found.tally.problem()
        if problem is not None:
            raise ValueError(problem)
        return found

    def drawable(
        self, tokenizer: PreTrainedTokenizerBase | None, *, judge_all: bool = False
    ) -> PromptSet:
        """Return a prompt for every row, each read when it is drawn; a sample is judged now.

        judge_all: judge all rows now, though without keeping them. ValueError as `loaded` says, for
        the rows judged now; drawing raises BadRows.
        """
        sample = range(len(self.rows)) if judge_all else self._sample()
        judged = self._read(tokenizer, sample, SAMPLE_ROWS)
        problem = judged.tally.problem(sampled=not judge_all)
        if problem is not None:
            raise ValueError(problem)
        reader = RowReader(tokenizer, self.rules)
        rows = RowPrompts(self.rows, self.rules, reader, judged.tally)
        return PromptSet(self.path, rows, judged.tally, judged.whole, judged.examples)

    def _read(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        numbers: Iterable[int],
        keep: int | None = None,
        *,
        stop: bool = False,
    ) -> PromptSet:
        """Judge rows. keep: the most prompts to hold on to; stop: when they are found."""
        tally, reader = (
            RowTally(self.path, self.rules, self.watched),
            RowReader(tokenizer, self.rules),
        )
        prompts: list[Prompt] = []
        numbers = iter(numbers)
        while part := list(islice(numbers, ROWS_AT_ONCE)):
            if stop and keep is not None and len(prompts) == keep:
                break
            records = [self.rules.columns.checked(self.rows.row(number)) for number in part]
            for outcome in reader.read(records):
                tally.add(outcome)
                prompt = outcome.prompt(len(prompts), self.rules)
                if prompt is not None and (keep is None or len(prompts) < keep):
                    prompts.append(prompt)
        found = tuple(prompts)
        return PromptSet(self.path, found, tally, tally.rows == len(self.rows), found)

    def _sample(self) -> list[int]:
        """Return rows from all over the file, and its first one."""
        rows = len(self.rows)
        each = max(1, self.rows.num_bytes // max(rows, 1))
        count = min(rows, SAMPLE_ROWS, max(1, SAMPLE_BYTES // each))
        chosen = np.random.default_rng(0).choice(rows, count, replace=False)
        return sorted({0, *chosen.tolist()} if rows else ())


def load_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    rules: PromptRules,
    *,
    first_rows: int | None = None,
) -> PromptSet:
    """Read and tokenise a prompt file; see PromptFile.loaded."""
    return PromptFile.open(path, rules).loaded(tokenizer, first_rows)
