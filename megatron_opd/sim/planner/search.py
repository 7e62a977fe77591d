"""Finds the Pareto front of throughput against staleness, by branch and bound.

Invariant: what is left out cannot be on the front. Classes of one bound on staleness are searched
in ascending order, in each the candidates with the least bounds first; a class ends once these are
no less than the fewest seconds simulated so far, in it or in an earlier class. Which of a block of
the least bounds is simulated first is guessed, as a fast one rules out many others.
Every candidate is simulated on the same samples (common random numbers).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Protocol

from megatron_opd.sim.planner.bounds import Bounds
from megatron_opd.sim.planner.candidates import Candidate, Space
from megatron_opd.sim.planner.quick import Quick, SearchNode

BLOCK = 256
"""Candidates that are put in the order of a guess before they are simulated."""


class MeasuredCandidate(Protocol):
    """Names what a simulation must tell of a candidate."""

    @property
    def seconds(self) -> float:
        """Returns the seconds from the end of the window's first update to that of its last."""
        ...

    @property
    def busy(self) -> dict[str, float]:
        """Returns the share of the time in which each stage works."""
        ...


Simulate = Callable[[Candidate], MeasuredCandidate]


@dataclass(frozen=True, slots=True)
class Trial:
    """Holds a candidate that was simulated. bound_s: the least seconds that were proven before."""

    candidate: Candidate
    bound_s: float
    measured: MeasuredCandidate


@dataclass(slots=True)
class SearchResult:
    """Holds what a search found. Counts are of candidates.

    best_s: the fewest seconds. front: the fastest of each class that is faster than all of less
    staleness. trials: in order of time. unproven_s: of a class that was not searched to its end,
    the least seconds that what is left may take. limited: enumerated ones, by the stage whose own
    bound is the largest; simulated_of: those of them that were simulated.
    """

    front: list[Trial] = field(default_factory=list[Trial])
    trials: list[Trial] = field(default_factory=list[Trial])
    unproven_s: dict[int, float] = field(default_factory=dict[int, float])
    best_s: float = math.inf
    enumerated: int = 0
    limited: Counter[str] = field(default_factory=Counter[str])
    simulated_of: Counter[str] = field(default_factory=Counter[str])

    @property
    def pruned(self) -> int:
        """Returns how many were left out for their bounds."""
        return self.enumerated - len(self.trials)


def search(
    space: Space,
    bounds: Bounds,
    simulate: Simulate,
    *,
    most: int | None = None,
    progress: Callable[[SearchResult], None] | None = None,
) -> SearchResult:
    """Return the front, exact for what `simulate` says, ties aside.

    most: candidates to simulate in a class; where they are not enough, `unproven_s` says what is
    left open. progress: told of each trial.
    """
    found, quick = SearchResult(), Quick(space, bounds)
    for bound in sorted({schedule.bound for schedule in space.schedules}):
        _search_class(quick, bounds, bound, found, simulate, most, progress)
    return found


def _search_class(
    quick: Quick,
    bounds: Bounds,
    bound: int,
    found: SearchResult,
    simulate: Simulate,
    most: int | None,
    progress: Callable[[SearchResult], None] | None,
) -> None:
    """Simulate what may be on the front in a class, and add its fastest if it is."""
    fastest: Trial | None = None
    tried = 0
    for block in _blocks(quick, bounds, bound, found):
        for done, (bound_s, candidate) in enumerate(block):
            if bound_s >= found.best_s:
                continue
            if tried == most:
                found.unproven_s[bound] = min(each_s for each_s, _ in block[done:])
                break
            tried += 1
            trial = Trial(candidate, bound_s, simulate(candidate))
            found.trials.append(trial)
            found.simulated_of[quick.stage(candidate)] += 1
            if trial.measured.seconds < found.best_s:
                found.best_s, fastest = trial.measured.seconds, trial
            if progress is not None:
                progress(found)
        if bound in found.unproven_s:
            break
    if fastest is not None:
        found.front.append(fastest)


def front_of(trials: Sequence[Trial]) -> list[Trial]:
    """Return the front of candidates that were all simulated."""
    front: list[Trial] = []
    for bound in sorted({trial.candidate.schedule.bound for trial in trials}):
        least = min(
            (trial for trial in trials if trial.candidate.schedule.bound == bound),
            key=lambda trial: trial.measured.seconds,
        )
        if not front or least.measured.seconds < front[-1].measured.seconds:
            front.append(least)
    return front


def _blocks(
    quick: Quick, bounds: Bounds, bound: int, found: SearchResult
) -> Iterator[list[tuple[float, Candidate]]]:
    """Yield the candidates of a class with their bounds, the most promising of each block first.

    No block holds a lesser bound than the one before.
    """
    ordered = _in_order(quick, bounds, bound, found)
    while block := [(bound_s, each) for each, bound_s in islice(ordered, BLOCK)]:
        yield sorted(block, key=lambda pair: bounds.seconds(pair[1], guess=True))


def _in_order(
    quick: Quick, bounds: Bounds, bound: int, found: SearchResult
) -> Iterator[tuple[Candidate, float]]:
    """Yield candidates of a class, the least bound first, while one may beat `found.best_s`.

    Bounds are made finer only for what comes first: of a node, of a candidate by its stages alone,
    and of all stages together.
    """
    numbers = count()
    heap: list[tuple[float, int, int, object]] = []
    for node in quick.nodes(bound):
        least_s, enumerated = quick.of_node(node, found.limited)
        found.enumerated += enumerated
        if enumerated:
            heap.append((least_s, 0, next(numbers), node))
    heapify(heap)
    while heap and heap[0][0] < found.best_s:
        least_s, level, _, item = heappop(heap)
        if isinstance(item, SearchNode):
            for candidate, seconds in quick.expanded(item):
                heappush(heap, (seconds, 1, next(numbers), candidate))
        elif level == 1:
            assert isinstance(item, Candidate)
            finer_s = max(least_s, bounds.seconds(item))
            heappush(heap, (finer_s, 2, next(numbers), item))
        else:
            assert isinstance(item, Candidate)
            yield item, least_s
