"""Defines how a controller schedules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Says how many updates the loops make and how much is in flight.

    updates: learner updates to make. batch_size: B. max_staleness: tau in versions. rollout_slots,
    score_slots: requests in flight at once. group_size: G, samples that are trained on together or
    not at all. hold_batches: h, batches that wait scored behind the one trained on.
    """

    updates: int
    batch_size: int
    max_staleness: int
    rollout_slots: int
    score_slots: int
    group_size: int = 1
    hold_batches: int = 0
