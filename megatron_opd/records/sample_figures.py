"""Describes a sample by a few numbers, so that its arrays need not be where it is counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NEAR_NATS = 0.05
"""Largest distance in nats from -ln V at which a score counts as uniform: a probability within 5%
of 1 / V."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Says how much a sample holds: cached ids of weight > 0, bytes of arrays, prompt excluded."""

    selected_ids: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ScoreShape:
    """Describes a teacher's scores of some sampled tokens, in nats.

    rows: how many, at least one. squares: of their distances from the mean, summed. near_uniform:
    how many are within NEAR_NATS of -ln V, as of a uniform distribution over the V ids. parts: of a
    mixture, the scores of each teacher, which have no parts; empty where one scored.
    """

    rows: int
    mean: float
    squares: float
    near_uniform: int
    parts: ScoreParts = ()

    @classmethod
    def of(cls, scores_T: npt.NDArray[np.float32], vocab_size: int) -> ScoreShape:
        """Describe finite scores, one per row. vocab_size: V, of their teacher."""
        wide_T = scores_T.astype(np.float64)
        near_T = np.abs(wide_T + np.log(vocab_size)) < NEAR_NATS
        mean = float(wide_T.mean())
        return cls(len(wide_T), mean, float(((wide_T - mean) ** 2).sum()), int(near_T.sum()))

    @property
    def std(self) -> float:
        """Returns the standard deviation over the rows, in nats."""
        return math.sqrt(self.squares / self.rows)

    @property
    def near_uniform_fraction(self) -> float:
        """Returns the share of rows that look uniform."""
        return self.near_uniform / self.rows

    def joined(self, other: ScoreShape) -> ScoreShape:
        """Describe both lots of scores together (Chan, Golub, LeVeque 1979)."""
        rows, difference = self.rows + other.rows, other.mean - self.mean
        return ScoreShape(
            rows,
            self.mean + difference * other.rows / rows,
            self.squares + other.squares + difference**2 * self.rows * other.rows / rows,
            self.near_uniform + other.near_uniform,
            joined_parts(self.parts, other.parts) if self.parts and other.parts else (),
        )


ScoreParts = tuple[tuple[str, ScoreShape], ...]
"""(teacher, its scores) of each teacher of a mixture, in the order of their names."""


def joined_parts(some: ScoreParts, others: ScoreParts) -> ScoreParts:
    """Describe both lots of scores together, teacher by teacher; both are of one mixture."""
    return tuple(
        (name, shape.joined(other)) for (name, shape), (_, other) in zip(some, others, strict=True)
    )


@dataclass(frozen=True, slots=True)
class AlignedScores:
    """Holds what the learner does not read of the scores of a teacher with another tokenizer.

    scored_T: uint8 [T], 1 where the sampled token has a score, of its own or of its chunk's; the
    others' is the sampler's log-prob, and weighs nothing. own_R: float32 [R], log q of the
    teacher's own tokens. chunked: a token's score is the sampler's log-prob and the log-ratio of
    its chunk.
    """

    scored_T: npt.NDArray[np.uint8]
    own_R: npt.NDArray[np.float32]
    chunked: bool = False
