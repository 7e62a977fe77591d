"""Defines how a controller schedules: a few numbers that every kind of schedule is made of."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_opd.buffer.planned import BatchPlan
from megatron_opd.buffer.spread import GroupRule
from megatron_opd.config.schedule import InFlight, ScheduleConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """Says how many updates the loops make, and how much is in flight.

    updates: learner updates to make. batch_size: B. kind: what may run ahead, and how far.
    rollout_slots, score_slots: requests in flight at once. group_size: G, samples that are trained
    on together or not at all. groups: which of them are thrown away for their rewards; None: none.
    plan: which version samples each update's batch; None: as permits and kind have it.
    """

    updates: int
    batch_size: int
    kind: ScheduleConfig
    rollout_slots: int
    score_slots: int
    group_size: int = 1
    groups: GroupRule | None = None
    plan: BatchPlan | None = None

    @property
    def permits(self) -> int:
        """Returns P, the prompts that may hold a permit."""
        return self.kind.permits(self.batch_size)

    @property
    def bound(self) -> int:
        """Returns the largest staleness of a token, in versions (buffer/permits.py)."""
        return self.kind.bound(self.batch_size)

    @property
    def in_flight(self) -> InFlight:
        """Returns what a weight sync does with responses that are being sampled."""
        return self.kind.in_flight

    @property
    def samples(self) -> int:
        """Returns how many samples all updates train on."""
        return self.updates * self.batch_size

    def samples_by(self, version: int) -> int:
        """Return how many of them may be admitted while `version` is live, or were before."""
        if self.plan is None:
            return self.samples
        return self.batch_size * self.plan.batches_by(version)

    def syncs_after(self, updates: int) -> bool:
        """Return whether a weight sync follows the update that made it `updates`."""
        return updates % self.kind.sync_every == 0 or updates == self.updates
