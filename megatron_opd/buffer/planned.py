"""Gives out the batch that was planned for each update, by which version samples it.

Update k trains on a batch that version sources[k] <= k has sampled, whole. Samples are held in the
order of their admission, which is that of (sources[j], j) over the updates j to come: so the place
of update k's batch among those held is the place of k in that order. docs/staleness.md has the
rule and its proof (A drawn staleness).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_opd.buffer.buffer import SampleBuffer
from megatron_opd.records.types import AnySample


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Says which version samples each update's batch: sources[k] <= k."""

    sources: tuple[int, ...]
    _rising: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rising", tuple(sorted(self.sources)))

    def batches_by(self, version: int) -> int:
        """Return how many batches of the run versions up to `version` sample."""
        return bisect_right(self._rising, version)


class PlannedBuffer(SampleBuffer):
    """Holds samples, and gives update k those that version sources[k] sampled for it.

    Args:
        batch_size: B.
        plan: of the run.
        updates: batches that were taken before.
    """

    def __init__(self, batch_size: int, plan: BatchPlan, updates: int = 0) -> None:
        super().__init__()
        self._batch_size, self._updates = batch_size, updates
        sources = plan.sources
        to_come = range(updates, len(sources))
        self._order = sorted(to_come, key=lambda update: (sources[update], update))
        self._sources = [sources[update] for update in self._order]
        self._taken: tuple[int, int, int] | None = None

    @property
    def ready(self) -> int:
        """Returns how many samples can be taken now.

        None before all are scored that versions up to the learner's give, as batches are told apart
        by their place among all that are held.
        """
        if self.waiting_for_score:
            return 0
        held = len(self._ready)
        planned = self._batch_size * bisect_right(self._sources, self._updates)
        return held if held >= planned or self._closed else 0

    def take(self, count: int) -> tuple[AnySample, ...]:
        """Remove and return the samples of the next batch; ValueError: `count` cannot be had.

        Where the prompts have ended before those of its batch, the oldest ones take their place.
        """
        if count > self.ready:
            raise ValueError(f"{count} samples were asked for, {self.ready} are ready")
        place = self._order.index(self._updates) if self._updates in self._order else 0
        if (place + 1) * self._batch_size > len(self._ready):
            place = 0
        first, held = place * self._batch_size, list(self._ready)
        self._ready.clear()
        self._ready.extend(held[:first] + held[first + count :])
        self._taken = place, self._order.pop(place), self._sources.pop(place)
        self._updates += 1
        return tuple(held[first : first + count])

    def put_back(self, samples: Sequence[AnySample]) -> None:
        """Take back what the last `take` gave, to its place."""
        assert self._taken is not None, "nothing was taken"
        place, update, source = self._taken
        self._order.insert(place, update)
        self._sources.insert(place, source)
        self._updates -= 1
        super().put_back(samples)
