"""Streams prompts in the order of their source, and passes over some by their pass rate.

Invariant: which prompt is the n-th depends on the source, the seed, n and the rates at that moment
alone, and rates change in `settle` alone, by the rewards noted until then in the order of their
uids. Where all that was sampled is scored before a version goes live (run.deterministic), a run and
its repetition pass over the same prompts.

The source is asked for one candidate after another. A candidate outside the band is taken with
probability `outside`, drawn from the seed and the candidate's number. After as many candidates in a
row as there are problems the next one is taken whatever its rate: the stream never ends for want of
one in the band.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_opd.config.curriculum import PassRateCurriculum
from megatron_opd.data.seeds import CURRICULUM, derived_seed
from megatron_opd.types import IntArray, Prompt, Sample

RateArray = npt.NDArray[np.float64]

# a rate is a sum of rounded steps: 0.9 may come out as 0.9000000000000001
EPS = 1e-9


class Candidates(Protocol):
    """Streams every problem once an epoch; the uid of a prompt is its number in the stream."""

    def __iter__(self) -> Iterator[Prompt]:
        """Return the stream itself."""
        ...

    def __next__(self) -> Prompt:
        """Return the next candidate."""
        ...

    def at(self, cursor: int) -> Candidates:
        """Return a source of the same stream that continues at `cursor`."""
        ...


class CurriculumState(msgspec.Struct, frozen=True):
    """Holds what a source continues from.

    looked_at: candidates so far; skipped: those passed over. rate_R, seen_R: pass rate of each
    problem, and the responses it was made of, at most `memory`. noted: (uid, row, reward) since
    the last `settle`.
    """

    looked_at: int
    skipped: int
    rate_R: RateArray
    seen_R: IntArray
    noted: list[tuple[int, int, float]]


class CurriculumSource:
    """Streams prompts without end, each `group_size` times in a row, as PromptSource does.

    Args:
        candidates: the problems in the order in which they are considered.
        problems: how many there are; the `row` of each prompt is below it.
        config: the band.
        seed: the run's.
        group_size: prompts given out in a row for one problem.
        cursor: the uid of the next prompt.
        state: of a source that had given out `cursor` prompts; None: no rate is known.
    """

    def __init__(
        self,
        candidates: Candidates,
        problems: int,
        config: PassRateCurriculum,
        *,
        seed: int,
        group_size: int = 1,
        cursor: int = 0,
        state: CurriculumState | None = None,
    ) -> None:
        if state is None:
            groups = -(-cursor // group_size)
            none, zero = np.zeros(problems), np.zeros(problems, np.int32)
            state = CurriculumState(groups, 0, none, zero, [])
        if len(state.rate_R) != problems or len(state.seen_R) != problems:
            raise ValueError(
                f"the curriculum of the checkpoint has {len(state.rate_R)} problems, "
                f"data.train has {problems}"
            )
        self._source, self._config, self._seed = candidates, config, seed
        self._group_size, self.cursor = group_size, cursor
        self._rate_R, self._seen_R = state.rate_R.copy(), state.seen_R.copy()
        self._noted, self._skipped = list(state.noted), state.skipped
        self._looked_at = state.looked_at
        self._candidates = candidates.at(state.looked_at)
        self._current: Prompt | None = None
        if cursor % group_size:  # the last candidate has prompts left to give out
            self._current = next(candidates.at(state.looked_at - 1))

    def at(self, cursor: int, state: CurriculumState | None = None) -> CurriculumSource:
        """Return a source of the same problems that continues at `cursor`."""
        return CurriculumSource(
            self._source,
            len(self._rate_R),
            self._config,
            seed=self._seed,
            group_size=self._group_size,
            cursor=cursor,
            state=state,
        )

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        if self.cursor % self._group_size == 0:
            self._current = self._chosen()
        assert self._current is not None
        prompt = replace(self._current, uid=self.cursor)
        self.cursor += 1
        return prompt

    def judged(self, sample: Sample) -> None:
        """Note the reward of a response, if it has one."""
        prompt = sample.rollout.prompt
        if sample.reward is not None:
            self._noted.append((prompt.uid, prompt.row, sample.reward))

    def settle(self) -> None:
        """Let the rewards noted so far change the rates."""
        for _, row, reward in sorted(self._noted):
            self._seen_R[row] = min(self._seen_R[row] + 1, self._config.memory)
            rate = self._rate_R[row] + (reward - self._rate_R[row]) / self._seen_R[row]
            self._rate_R[row] = min(1.0, max(0.0, rate))
        self._noted.clear()

    @property
    def state(self) -> CurriculumState:
        """Returns the `state` of a source that continues from here."""
        return CurriculumState(
            self._looked_at,
            self._skipped,
            self._rate_R.copy(),
            self._seen_R.copy(),
            list(self._noted),
        )

    def columns(self) -> dict[str, float | int | None]:
        """Return what metrics.jsonl shows of it."""
        rated_R = self._seen_R > 0
        rated = int(rated_R.sum())
        inside = int((rated_R & self._inside(self._rate_R)).sum())
        return {
            "curriculum_skipped": self._skipped,
            "curriculum_rated_fraction": rated / len(self._rate_R),
            "curriculum_in_band_fraction": inside / rated if rated else None,
        }

    def _chosen(self) -> Prompt:
        for _ in range(len(self._rate_R)):
            candidate = self._next_candidate()
            if self._takes(candidate):
                return candidate
            self._skipped += 1
        return self._next_candidate()

    def _next_candidate(self) -> Prompt:
        candidate = next(self._candidates)
        self._looked_at += 1
        return candidate

    def _takes(self, candidate: Prompt) -> bool:
        row = candidate.row
        if not self._seen_R[row] or self._inside(self._rate_R[row]):
            return True
        drawn = derived_seed(self._seed, CURRICULUM, candidate.uid) / 2**63
        return drawn < self._config.outside

    def _inside(self, rate: RateArray) -> npt.NDArray[np.bool_]:
        return (rate >= self._config.low - EPS) & (rate <= self._config.high + EPS)
