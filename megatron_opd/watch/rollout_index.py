"""Reads rollouts.jsonl: keeps in memory what lists and filters need, and where each row is.

Rows are taken as they come; a damaged one is counted and left out. Row numbers rise with the file,
so a list that names how many rows it knew (`upto`) does not change while more arrive.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_opd.metrics.rollouts import RolloutRow
from megatron_opd.report.appended import AppendedLines, Line
from megatron_opd.watch.query import Filters, Page

SEARCHED = 4000
"""Characters of a prompt, and of a response, that a text is looked for in."""
PREVIEW = 200
"""Characters of both that a list shows."""
STEP_BYTES = 8 * 2**20
"""Bytes that are read at once; a request waits for as much at most."""
NONE = np.nan

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FoundRollouts:
    """Holds one part of a list. total: rows that pass the filters; upto: rows looked at."""

    total: int
    upto: int
    rows: tuple[dict[str, Any], ...]


class RolloutIndex:
    """Reads one rollouts.jsonl as it grows. Use from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._lines = AppendedLines(path)
        self._decoder = msgspec.json.Decoder(RolloutRow)
        self.path = path
        self._clear()
        self.epoch = 0
        """Rises when the file was replaced, so that row numbers mean others."""

    def _clear(self) -> None:
        self.damaged = 0
        self.read_bytes = 0
        self._places: list[tuple[int, int]] = []
        self._numbers = {
            name: array("d") for name in ("update", "uid", "reward", "staleness", "tokens", "gap")
        }
        self._teacher_of, self._drop_of = array("l"), array("l")
        self.teachers: list[str] = []
        self.drop_reasons: list[str] = [""]
        self._texts: list[str] = []
        self._shown: list[tuple[str, str, str]] = []
        self._last: tuple[object, Rows] | None = None

    def __len__(self) -> int:
        return len(self._places)

    def read(self) -> bool:
        """Take some of the new rows; return whether there are more. May raise OSError."""
        found = self._lines.read(STEP_BYTES)
        if found.started_over:
            self._clear()
            self.epoch += 1
        for line in found.lines:
            self._add(line)
            self.read_bytes = line.offset + len(line.content) + 1
        return found.more

    def _add(self, line: Line) -> None:
        try:
            row = self._decoder.decode(line.content)
            gap = mean_gap(row)
        except (msgspec.DecodeError, RecursionError, ValueError, OverflowError):
            self.damaged += 1
            return
        self._places.append((line.offset, len(line.content)))
        figures = {
            "update": row.update,
            "uid": row.uid,
            "reward": NONE if row.reward is None else row.reward,
            "staleness": NONE if row.staleness_versions is None else row.staleness_versions,
            "tokens": len(row.tokens),
            "gap": gap,
        }
        for name, value in figures.items():
            self._numbers[name].append(value)
        self._teacher_of.append(_code(self.teachers, row.teacher))
        self._drop_of.append(_code(self.drop_reasons, row.drop_reason or ""))
        prompt, response = row.prompt or "", "".join(row.tokens)
        self._texts.append(f"{prompt[:SEARCHED]}\n{response[:SEARCHED]}".lower())
        # a chat template stands before the question: the end of a prompt says more
        self._shown.append((prompt[-PREVIEW:], response[:PREVIEW], row.finish_reason or ""))

    def find(self, filters: Filters, page: Page) -> FoundRollouts:
        """Return one part of the list that `filters` describe."""
        upto = len(self) if filters.upto is None else min(filters.upto, len(self))
        numbers = self._matching(filters, upto)
        part = numbers[page.offset : page.offset + page.limit]
        return FoundRollouts(len(numbers), upto, tuple(self._summary(int(i)) for i in part))

    def row(self, number: int) -> bytes:
        """Return the JSON text of a whole row. LookupError: there is none, or no longer."""
        if not 0 <= number < len(self):
            raise LookupError(f"rollout {number} is not there; there are {len(self)}")
        offset, length = self._places[number]
        with self.path.open("rb") as stream:
            stream.seek(offset)
            content = stream.read(length)
        row = self._decoder.decode(content)
        if (row.uid, row.update) != (self._whole("uid", number), self._whole("update", number)):
            raise LookupError(f"rollout {number} is another one now: the file was replaced")
        return content

    def _whole(self, name: str, number: int) -> int:
        return int(self._numbers[name][number])

    def _matching(self, filters: Filters, upto: int) -> Rows:
        """Return the numbers of the rows that pass, in order; the last answer is kept."""
        key = (filters, upto, self.epoch)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._sorted(self._passing(filters, upto), filters))
        return self._last[1]

    def _passing(self, filters: Filters, upto: int) -> Rows:
        passes = np.ones(upto, bool)
        for name in ("update", "reward", "staleness"):
            least, most = getattr(filters, f"{name}_min"), getattr(filters, f"{name}_max")
            values = self._column(name, upto) if (least, most) != (None, None) else None
            if values is not None and least is not None:
                passes &= values >= least  # NaN never is
            if values is not None and most is not None:
                passes &= values <= most
        drops = np.array(self._drop_of[:upto], np.int64)
        if filters.outcome is not None:
            passes &= (drops == 0) == (filters.outcome == "trained")
        if filters.drop_reason is not None:
            passes &= drops == _known(self.drop_reasons, filters.drop_reason)
        if filters.teacher is not None:
            teachers = np.array(self._teacher_of[:upto], np.int64)
            passes &= teachers == _known(self.teachers, filters.teacher)
        rows = np.flatnonzero(passes)
        if filters.text:
            texts, text = self._texts, filters.text
            rows = np.array([i for i in rows.tolist() if text in texts[i]], np.int64)
        return rows

    def _sorted(self, rows: Rows, filters: Filters) -> Rows:
        if filters.sort == "update":
            return rows[::-1] if filters.descending else rows
        values = self._column(filters.sort, len(self))[rows]
        if filters.descending:
            values = -values
        return rows[np.argsort(values, kind="stable")]  # NaN comes last either way

    def _column(self, name: str, upto: int) -> npt.NDArray[np.float64]:
        return np.array(self._numbers[name][:upto], np.float64)

    def _summary(self, number: int) -> dict[str, Any]:
        figures = {name: values[number] for name, values in self._numbers.items()}
        whole = {name: int(figures[name]) for name in ("update", "uid", "tokens")}
        loose = {
            name: None if np.isnan(figures[name]) else figures[name]
            for name in ("reward", "staleness", "gap")
        }
        prompt, response, finish = self._shown[number]
        return {
            "number": number,
            **whole,
            **loose,
            "teacher": self.teachers[self._teacher_of[number]],
            "drop_reason": self.drop_reasons[self._drop_of[number]] or None,
            "finish_reason": finish or None,
            "prompt": prompt,
            "response": response,
        }


def mean_gap(row: RolloutRow) -> float:
    """Return the mean of log p_sampler - log q_teacher by token, in nats; NaN without a score.

    The sampled tokens' estimate of the reverse KL. ValueError: the lists differ in length.
    """
    lengths = {len(row.tokens), len(row.sampler_logp)}
    if row.teacher_logp is not None:
        lengths.add(len(row.teacher_logp))
    if len(lengths) > 1:
        raise ValueError("tokens and log-probs differ in number")
    pairs = zip(row.sampler_logp, row.teacher_logp or (), strict=False)
    gaps = [own - score for own, score in pairs if score is not None]
    return sum(gaps) / len(gaps) if gaps else NONE


def _code(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def _known(names: list[str], name: str) -> int:
    return names.index(name) if name in names else -1
