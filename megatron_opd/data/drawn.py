"""Gives prompts of files that are too large to be read before a run: each when it is drawn.

Invariant: what becomes of a row does not depend on when it is read, nor on the rows read with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from megatron_opd.data.faults import BadRows
from megatron_opd.data.files import Rows
from megatron_opd.data.outcomes import RowOutcome, RowReader, RowTally
from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.records.types import Prompt

AT_ONCE = 16
"""Rows that are read and tokenised together."""


class RowPrompts:
    """Reads, renders and judges the rows of a file when they are asked for.

    tally: counts the rows that were drawn, besides those that were judged before.
    """

    def __init__(self, rows: Rows, rules: PromptRules, reader: RowReader, tally: RowTally) -> None:
        self._rows, self._rules, self._reader, self.tally = rows, rules, reader, tally

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Returns how large the rows are, unpacked."""
        return self._rows.num_bytes

    def __getitem__(self, number: int) -> Prompt | None:
        """Return the prompt of a row, None for one that cannot be used; see `taken`."""
        (outcome,) = self.read([number])
        return self.taken(number, outcome)

    def read(self, numbers: Sequence[int]) -> list[RowOutcome]:
        """Return what becomes of rows. ValueError: the tokenizer or its template fails."""
        columns = self._rules.columns
        return self._reader.read([columns.checked(self._rows.row(number)) for number in numbers])

    def taken(self, number: int, outcome: RowOutcome) -> Prompt | None:
        """Count a row that is drawn. BadRows: more of those so far are bad than allowed."""
        self.tally.add(outcome)
        problem = self.tally.problem(sampled=True)
        if problem is not None:
            raise BadRows(f"{problem}; opd check --data judges all rows")
        return outcome.prompt(number, self._rules)


class DrawnPrompts:
    """Gives the prompts of one source, from rows of several files, those that come next in advance.

    parts: the rows, and the first of them and the first beyond them that are in the source.
    """

    def __init__(self, parts: Iterable[tuple[RowPrompts, int, int]]) -> None:
        self._parts = tuple(parts)
        self._ends = np.cumsum([end - start for _, start, end in self._parts])
        self._held: dict[int, tuple[Future[list[RowOutcome]], int]] = {}
        """By place, for those that come next: what becomes of some rows, and which of them it is"""
        self._thread = ThreadPoolExecutor(1, "prompts")  # its only one: tokenizers are not shared

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, place: int) -> Prompt | None:
        """Return the prompt at a place, None for a row that cannot be used.

        BadRows: too many cannot, or the tokenizer or its template fails.
        """
        if place not in self._held:
            self._begin([place])
        found, index = self._held.pop(place)
        try:
            outcome = found.result()[index]
        except ValueError as error:
            raise BadRows(str(error)) from None
        rows, number = self._row(place)
        return rows.taken(number, outcome)

    def expect(self, places: Sequence[int]) -> None:
        """Read the rows at these places in advance, and forget all others."""
        self._held = {place: self._held[place] for place in places if place in self._held}
        new = [place for place in places if place not in self._held]
        if len(new) >= AT_ONCE or (new and new[0] == places[0]):
            for start in range(0, len(new), AT_ONCE):
                self._begin(new[start : start + AT_ONCE])

    def _begin(self, places: Sequence[int]) -> None:
        rows = [self._row(place) for place in places]
        for each in dict.fromkeys(file for file, _ in rows):
            own = [n for n, (file, _) in enumerate(rows) if file is each]
            found = self._thread.submit(each.read, [rows[n][1] for n in own])
            self._held |= {places[n]: (found, index) for index, n in enumerate(own)}

    def _row(self, place: int) -> tuple[RowPrompts, int]:
        index = int(np.searchsorted(self._ends, place, side="right"))
        rows, _, end = self._parts[index]
        return rows, end - (int(self._ends[index]) - place)
