"""Checks whether a teacher's scores look plausible: their mean, spread and share of uniform ones.

A score is log q of a sampled token, one a row. A server whose head is empty, whose weights were
never loaded or whose reply is filled in says -ln V of everything (V: the vocabulary), or one number
for all; losses stay finite and a run looks healthy. What cannot be seen here is a teacher that is
sure of the wrong things: its scores have a spread, and their mean is a model's own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_opd.types import Batch, FloatArray, IntArray

logger = logging.getLogger(__name__)

NEAR_NATS = 0.05
"""Largest distance in nats from -ln V at which a score counts as uniform: a probability within 5%
of 1 / V."""
NEAR_UNIFORM_FRACTION = 0.25
"""Share of uniform rows from which scores count as wrong: one of four servers may be the broken
one. A trained teacher has few (the demo's at most 0.001); a freshly initialised model can have as
many."""
FLAT_NATS = 1e-4
"""Standard deviation in nats below which all scores count as one number."""
SURE_NATS = 0.01
"""Distance from 0 in nats: a teacher that is sure of every token scores them all with about 0,
which is plausible."""
MIN_ROWS = 8
"""Least number of rows to judge scores by."""
COLUMNS = (
    "teacher_score_mean_nats",
    "teacher_score_std_nats",
    "teacher_near_uniform_fraction",
)


class NonsenseTeacher(RuntimeError):
    """Reports that a teacher's scores were implausible for scoring.guard_stop_after updates."""


@dataclass(frozen=True, slots=True)
class ScoreShape:
    """Describes the scores of some rows. rows: at least one; mean, std: in nats."""

    rows: int
    mean: float
    std: float
    near_uniform: float

    @classmethod
    def of(cls, scores_T: FloatArray, vocab_size: int | IntArray) -> ScoreShape:
        """Describe finite scores, one per row. vocab_size: of the teacher, or of each row's."""
        wide_T = scores_T.astype(np.float64)
        near_T = np.abs(wide_T + np.log(vocab_size)) < NEAR_NATS
        return cls(len(wide_T), float(wide_T.mean()), float(wide_T.std()), float(near_T.mean()))

    def problem(self, vocab_size: int) -> str | None:
        """Return what is wrong with the scores, in words; None when nothing is, or rows are few."""
        if self.rows < MIN_ROWS:
            return None
        if self.near_uniform >= NEAR_UNIFORM_FRACTION:
            return (
                f"{self.near_uniform:.0%} of {self.rows} scores are within {NEAR_NATS} nats of "
                f"-ln {vocab_size} = {-math.log(vocab_size):.3f}, as of a uniform distribution"
            )
        if self.std < FLAT_NATS and self.mean < -SURE_NATS:
            return f"all {self.rows} scores are {self.mean:.3f} nats"
        return None


def path_scores(batch: Batch) -> dict[str, FloatArray]:
    """Return the sampled tokens' scores, float32, by the teacher that gave them, names in order.

    Samples for which no teacher was asked are left out.
    """
    found: dict[str, list[FloatArray]] = {}
    for sample in batch.samples:
        if not sample.has_scores:
            continue
        scores_T = sample.teacher_logp_N[sample.rollout.draws.path_T]
        found.setdefault(sample.rollout.prompt.teacher, []).append(scores_T)
    return {name: np.concatenate(found[name]) for name in sorted(found)}


class TeacherWatch:
    """Checks the scores of every batch; warns once an episode, and stops a run if asked to.

    Args:
        teachers: V of each, by name.
        alarm: whether to warn at all; the columns are made in any case.
        stop_after: raise NonsenseTeacher after so many updates in a row; 0: never.
    """

    def __init__(self, teachers: Mapping[str, int], *, alarm: bool, stop_after: int) -> None:
        self._several = len(teachers) > 1
        self._vocab_sizes = dict(teachers)
        self._alarm, self._stop_after = alarm, stop_after
        self._bad_in_a_row = dict.fromkeys(teachers, 0)

    def columns(self, batch: Batch) -> Mapping[str, float | None]:
        """Return teacher_score_mean_nats, teacher_score_std_nats, teacher_near_uniform_fraction.

        Of all teachers together, and with several also of each, as COLUMN/NAME. None where no
        teacher was asked.
        """
        by_name = path_scores(batch)
        if not by_name:
            return dict.fromkeys(COLUMNS)
        sizes_T = np.repeat(
            [self._vocab_sizes[name] for name in by_name], [len(each) for each in by_name.values()]
        )
        columns = _columns(np.concatenate(list(by_name.values())), sizes_T)
        if self._several:
            for name, scores_T in by_name.items():
                own = _columns(scores_T, self._vocab_sizes[name])
                columns |= {f"{column}/{name}": value for column, value in own.items()}
        return columns

    def look(self, batch: Batch) -> None:
        """Count and report implausible scores. Raises NonsenseTeacher."""
        if not self._alarm:
            return
        for name, scores_T in path_scores(batch).items():
            vocab_size = self._vocab_sizes[name]
            problem = ScoreShape.of(scores_T, vocab_size).problem(vocab_size)
            bad = self._bad_in_a_row[name] + 1 if problem is not None else 0
            if bad == 1:
                logger.warning(
                    "update %d: teacher %r answers nonsense: %s; scoring.guard warns once until "
                    "its scores are better",
                    *(batch.update, name, problem),
                )
            elif bad == 0 and self._bad_in_a_row[name]:
                logger.warning(
                    "update %d: teacher %r answers sensibly again, after %d updates",
                    *(batch.update, name, self._bad_in_a_row[name]),
                )
            self._bad_in_a_row[name] = bad
            if 0 < self._stop_after <= bad:
                raise NonsenseTeacher(
                    f"teacher {name!r} answered nonsense in {bad} updates in a row: {problem}; look"
                    " at its server, or set scoring.guard to warn"
                )


def _columns(scores_T: FloatArray, vocab_size: int | IntArray) -> dict[str, float]:
    shape = ScoreShape.of(scores_T, vocab_size)
    values = (shape.mean, shape.std, shape.near_uniform)
    return dict(zip(COLUMNS, values, strict=True))
