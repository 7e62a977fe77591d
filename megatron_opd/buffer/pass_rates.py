"""Keeps the pass rate of every problem: the mean reward of its latest responses.

Invariant: rates change in `apply_noted` alone, by the rewards noted until then, in the order of the
uids, whatever the order in which they were noted.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_opd.config.curriculum import PassRateCurriculum
from megatron_opd.records.types import NO_ROW, AnySample, IntArray

RateArray = npt.NDArray[np.float64]

# a rate is a sum of rounded steps: 0.9 may come out as 0.9000000000000001
EPS = 1e-9


class CurriculumState(msgspec.Struct, frozen=True):
    """Holds what a curriculum continues from.

    looked_at: candidates considered; skipped: those passed over. rate_R, seen_R: pass rate of each
    problem, and the responses it was made of, at most `memory`. noted: (uid, row, reward) since
    the last `apply_noted`.
    """

    looked_at: int
    skipped: int
    rate_R: RateArray
    seen_R: IntArray
    noted: list[tuple[int, int, float]]


class PassRates:
    """Holds the rates of the problems, by their rows.

    Args:
        config: the band, and how fast rates move.
        state: where an earlier one ended.
    """

    def __init__(self, config: PassRateCurriculum, state: CurriculumState) -> None:
        self._config = config
        self.rate_R, self.seen_R = state.rate_R.copy(), state.seen_R.copy()
        self.noted = list(state.noted)

    def note(self, sample: AnySample) -> None:
        """Note the reward of a response, if it has one and its problem is still there."""
        prompt = sample.rollout.prompt
        if sample.reward is not None and prompt.row != NO_ROW:
            self.noted.append((prompt.uid, prompt.row, sample.reward))

    def apply_noted(self) -> None:
        """Let the rewards noted so far change the rates."""
        for _, row, reward in sorted(self.noted):
            self.seen_R[row] = min(self.seen_R[row] + 1, self._config.memory)
            rate = self.rate_R[row] + (reward - self.rate_R[row]) / self.seen_R[row]
            self.rate_R[row] = min(1.0, max(0.0, rate))
        self.noted.clear()

    def is_wanted(self, row: int) -> bool:
        """Tell whether a problem has no rate yet, or one in the band."""
        return bool(self.seen_R[row] == 0 or self._inside(self.rate_R[row]))

    def shares(self) -> tuple[float, float | None]:
        """Return the share of problems that have a rate, and of those the share in the band."""
        rated_R = self.seen_R > 0
        rated, inside = int(rated_R.sum()), int((rated_R & self._inside(self.rate_R)).sum())
        return rated / len(self.rate_R), inside / rated if rated else None

    def _inside(self, rate: RateArray) -> npt.NDArray[np.bool_]:
        return (rate >= self._config.low - EPS) & (rate <= self._config.high + EPS)
