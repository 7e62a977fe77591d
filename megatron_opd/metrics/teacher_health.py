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
from functools import reduce

from megatron_opd.records.sample_figures import NEAR_NATS, ScoreShape
from megatron_opd.records.types import Batch

logger = logging.getLogger(__name__)

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


def score_problem(shape: ScoreShape, vocab_size: int) -> str | None:
    """Return what is wrong with scores, in words; None when nothing is, or rows are few."""
    if shape.rows < MIN_ROWS:
        return None
    if shape.near_uniform_fraction >= NEAR_UNIFORM_FRACTION:
        return (
            f"{shape.near_uniform_fraction:.0%} of {shape.rows} scores are within {NEAR_NATS} nats "
            f"of -ln {vocab_size} = {-math.log(vocab_size):.3f}, as of a uniform distribution"
        )
    if shape.std < FLAT_NATS and shape.mean < -SURE_NATS:
        return f"all {shape.rows} scores are {shape.mean:.3f} nats"
    return None


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

        Of all teachers together, mixtures as such, and with several also of each, as COLUMN/NAME.
        None where no teacher was asked.
        """
        of_all = self._shapes(batch, mixed=True)
        if not of_all:
            return dict.fromkeys(COLUMNS)
        columns = _columns(reduce(ScoreShape.joined, of_all.values()))
        if self._several:
            for name, shape in self._shapes(batch).items():
                columns |= {f"{column}/{name}": value for column, value in _columns(shape).items()}
        return columns

    def look(self, batch: Batch) -> None:
        """Count and report implausible scores. Raises NonsenseTeacher."""
        if not self._alarm:
            return
        for name, shape in self._shapes(batch).items():
            wrong = score_problem(shape, self._vocab_sizes[name])
            bad = self._bad_in_a_row[name] + 1 if wrong is not None else 0
            if bad == 1:
                logger.warning(
                    "update %d: teacher %r answers nonsense: %s; scoring.guard warns once until "
                    "its scores are better",
                    batch.update,
                    name,
                    wrong,
                )
            elif bad == 0 and self._bad_in_a_row[name]:
                logger.warning(
                    "update %d: teacher %r answers sensibly again, after %d updates",
                    batch.update,
                    name,
                    self._bad_in_a_row[name],
                )
            self._bad_in_a_row[name] = bad
            if 0 < self._stop_after <= bad:
                raise NonsenseTeacher(
                    f"teacher {name!r} answered nonsense in {bad} updates in a row: {wrong}; look"
                    " at its server, or set scoring.guard to warn"
                )

    def _shapes(self, batch: Batch, *, mixed: bool = False) -> dict[str, ScoreShape]:
        """Describe the sampled tokens' scores by the teacher that gave them, names in order.

        mixed: by mixture, what its teachers say together. Samples for which no teacher was asked
        are left out.
        """
        found: dict[str, ScoreShape] = {}
        for sample in batch.samples:
            prompt = sample.rollout.prompt
            size = max(self._vocab_sizes[name] for name, _ in prompt.shares)
            shape = sample.scores(size) if sample.has_scores else None
            if shape is None:
                continue
            given = shape.parts if prompt.mixture and not mixed else ((prompt.teacher, shape),)
            for name, each in given:
                found[name] = found[name].joined(each) if name in found else each
        return {name: found[name] for name in sorted(found)}


def _columns(shape: ScoreShape) -> dict[str, float]:
    values = (shape.mean, shape.std, shape.near_uniform_fraction)
    return dict(zip(COLUMNS, values, strict=True))
