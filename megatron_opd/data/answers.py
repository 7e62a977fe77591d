"""Encodes answers to learn from as the student would sample them, with the token that ends each.

Invariant: an answer's ids end with its only end token: no response goes on behind one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_opd.config.wording import shown
from megatron_opd.data.marks import Mark
from megatron_opd.records.runs import SampledRun, positions_of
from megatron_opd.records.types import IntArray, OffsetArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOT_ENDED, CUT = "not_ended", "cut"


@dataclass(frozen=True, slots=True)
class Example:
    """Holds one sequence to learn from.

    ids_S: int32. runs: where its answers are, each with its end token; the other ids are given.
    """

    ids_S: IntArray
    runs: tuple[SampledRun, ...]

    @property
    def num_tokens(self) -> int:
        """Returns the number of all ids."""
        return len(self.ids_S)

    @property
    def position_T(self) -> OffsetArray:
        """Returns int64 [T]: where the ids lie that are learnt."""
        return positions_of(self.runs)


MarkedExample = tuple[Example, tuple[Mark, ...]]
"""An example, and what is unexpected about it."""


def one_answer(prompt: Sequence[int], response: Sequence[int]) -> Example:
    """Return the example of a prompt and the response behind it."""
    ids_S = np.array([*prompt, *response], dtype=np.int32)
    return Example(ids_S, (SampledRun(0, len(prompt), len(ids_S)),))


class AnswerEncoder:
    """Encodes answers with one tokenizer.

    end_ids: tokens that end a response. end_id: the one that is put behind a response without any.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], end_id: int
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._end_ids, self._end_id = frozenset(end_ids), end_id
        names: Any = tokenizer.convert_ids_to_tokens(sorted(self._end_ids))
        self.end_names: tuple[str, ...] = tuple(name for name in names if name)

    def encoded(self, text: str, behind: str) -> tuple[list[int], tuple[Mark, ...]]:
        """Return the ids of an answer, and how it is marked.

        behind: what the template puts behind its text.
        """
        response, marks = self.ended(self.ids(text + behind)), self.cut(self.ids(text.rstrip()))
        if response is not None:
            return response, marks
        closed = _brief(behind.rstrip()) if behind.strip() else "nothing"
        end = self._tokenizer.decode([self._end_id])
        mark = Mark(NOT_ENDED, f"{closed} is behind the answer, {end} is added")
        return [*self.ids(text + behind.rstrip()), self._end_id], (*marks, mark)

    def cut(self, ids: list[int]) -> tuple[Mark, ...]:
        """Return a mark for an answer that goes on behind an end token."""
        kept = len(self.ended(ids) or ids)
        lost = str(self._tokenizer.decode(ids[kept:]))
        if not lost.strip():
            return ()
        return (Mark(CUT, f"{self._tokenizer.decode(ids[kept - 1 : kept])} before {_brief(lost)}"),)

    def ended(self, ids: list[int]) -> list[int] | None:
        """Return a response up to its first end token, as a server ends it; None without one."""
        ends = (n for n, i in enumerate(ids, start=1) if i in self._end_ids)
        return next((ids[:n] for n in ends), None)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text within a sequence."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _brief(text: str) -> str:
    return shown(text, 60)
