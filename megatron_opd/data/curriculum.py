"""Streams prompts in the order of their source, and passes over some by their pass rate.

Invariant: which prompt is the n-th depends on the source, the seed, n and the pass rates at that
moment alone, and those change when a version goes live. Where all that was sampled is scored before
that (run.deterministic), a run and its repetition pass over the same prompts.

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

from megatron_opd.buffer.pass_rates import CurriculumState, PassRates
from megatron_opd.config.curriculum import PassRateCurriculum
from megatron_opd.records.seeds import CURRICULUM, derived_seed
from megatron_opd.records.types import AnySample, Prompt


class Candidates(Protocol):
    """Streams every problem once an epoch; the uid of a prompt is its number in the stream."""

    def __iter__(self) -> Iterator[Prompt]:
        """Return the stream itself."""
        ...

    def __next__(self) -> Prompt:
        """Return the next candidate."""
        ...

    @property
    def passed(self) -> list[list[int]]:
        """Returns what it passed over, see PromptSource."""
        ...

    def at(self, cursor: int) -> Candidates:
        """Return a source of the same stream that continues at `cursor`."""
        ...

    def epochs_at(self, cursor: int) -> dict[str, float]:
        """Return how often each file was read when `cursor` candidates were given out."""
        ...


class CurriculumSource:
    """Streams prompts without end, each `group_size` times in a row, as PromptSource does.

    Args:
        candidates: the problems in the order in which they are considered.
        problems: how many there are; the `row` of each prompt is below it.
        config: the band.
        seed: the run's.
        group_size: prompts given out in a row for one problem.
        cursor: the uid of the next prompt.
        state: of a source that had given out `cursor` prompts; None: no rate is known. It may know
            fewer problems, where some were added since.
        held: what the group at `cursor` has been given, where it is begun.
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
        held: Prompt | None = None,
    ) -> None:
        if state is None:
            groups = -(-cursor // group_size)
            none, zero = np.zeros(problems), np.zeros(problems, np.int32)
            state = CurriculumState(groups, 0, none, zero, [])
        if len(state.rate_R) > problems:
            raise ValueError(
                f"the curriculum of the checkpoint has {len(state.rate_R)} problems, "
                f"data.train has {problems}"
            )
        self._problems, self._config = problems, config
        self._seed, self.group_size, self.cursor = seed, group_size, cursor
        added = (0, problems - len(state.rate_R))
        rate_R, seen_R = np.pad(state.rate_R, added), np.pad(state.seen_R, added)
        self._rates = PassRates(
            config, msgspec.structs.replace(state, rate_R=rate_R, seen_R=seen_R)
        )
        self._looked_at, self._skipped = state.looked_at, state.skipped
        self._candidates = candidates.at(state.looked_at)
        self._current: Prompt | None = None
        if cursor % group_size:  # the last candidate has prompts left to give out
            self._current = held or next(candidates.at(state.looked_at - 1))

    def at(
        self, cursor: int, state: CurriculumState | None = None, held: Prompt | None = None
    ) -> CurriculumSource:
        """Return a source of the same problems that continues at `cursor`."""
        return CurriculumSource(
            self._candidates,  # which know what was passed over
            self._problems,
            self._config,
            seed=self._seed,
            group_size=self.group_size,
            cursor=cursor,
            state=state,
            held=held,
        )

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        if self.cursor % self.group_size == 0:
            self._current = self._chosen()
        assert self._current is not None
        prompt = replace(self._current, uid=self.cursor)
        self.cursor += 1
        return prompt

    def judged(self, sample: AnySample) -> None:
        """Note the reward of a response, if it has one."""
        self._rates.note(sample)

    def apply_noted(self) -> None:
        """Let the rewards noted so far decide about the prompts to come."""
        self._rates.apply_noted()

    @property
    def state(self) -> CurriculumState:
        """Returns the `state` of a source that continues from here."""
        rates = self._rates
        rate_R, seen_R, noted = rates.rate_R.copy(), rates.seen_R.copy(), list(rates.noted)
        return CurriculumState(self._looked_at, self._skipped, rate_R, seen_R, noted)

    def epochs_at(self, cursor: int) -> dict[str, float]:
        """Return how often each file was read by now, what was passed over included."""
        return self._candidates.epochs_at(self._looked_at)

    @property
    def passed(self) -> list[list[int]]:
        """Returns what the candidates have passed over."""
        return self._candidates.passed

    def columns(self) -> dict[str, float | int | None]:
        """Return what metrics.jsonl shows of it."""
        rated, inside = self._rates.shares()
        return {
            "curriculum_skipped": self._skipped,
            "curriculum_rated_fraction": rated,
            "curriculum_in_band_fraction": inside,
        }

    def _chosen(self) -> Prompt:
        for _ in range(self._problems):
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
        if self._rates.is_wanted(candidate.row):
            return True
        drawn = derived_seed(self._seed, CURRICULUM, candidate.uid) / 2**63
        return drawn < self._config.outside
