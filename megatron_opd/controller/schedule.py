"""Defines how a controller schedules: a few numbers that every kind of schedule is made of."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import ceil

from megatron_opd.buffer.delays import batch_plan
from megatron_opd.buffer.planned import BatchPlan
from megatron_opd.buffer.spread import GroupRule
from megatron_opd.config.schedule import InFlight, ScheduleConfig
from megatron_opd.config.schema import Config
from megatron_opd.config.selection import RewardSpread
from megatron_opd.config.sites import open_permits

ROUNDS_TOO_OLD = 8
"""As many times may all that sites hold come too old in a row before the run ends. A site that
comes back after a long break brings one such round, with nothing wrong."""


@dataclass(frozen=True, slots=True)
class SiteSchedule:
    """Says that sampler sites sample, which have weights of their own (megatron_opd/sites/).

    slots: prompts that all sites hold at once. window: largest staleness of open admission, in
    updates; None: the schedule's permits bound admission.
    """

    slots: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Says how many updates the loops make, and how much is in flight.

    updates: learner updates to make. batch_size: B. kind: what may run ahead, and how far.
    rollout_slots, score_slots: requests in flight at once. group_size: G, samples that are trained
    on together or not at all. groups: which of them are thrown away for their rewards; None: none.
    plan: which version samples each update's batch; None: as permits and kind have it.
    sites: the sites that sample; None: servers that every weight sync waits for.
    """

    updates: int
    batch_size: int
    kind: ScheduleConfig
    rollout_slots: int
    score_slots: int
    group_size: int = 1
    groups: GroupRule | None = None
    plan: BatchPlan | None = None
    sites: SiteSchedule | None = None

    @property
    def permits(self) -> int:
        """Returns P, the prompts that may hold a permit: Config.permits where a run made this."""
        if self.sites is None or self.sites.window is None:
            return self.kind.permits(self.batch_size)
        slots, window, every = self.sites.slots, self.sites.window, self.kind.sync_every
        return open_permits(self.batch_size, self.group_size, slots, window, every)

    @property
    def bound(self) -> int:
        """Returns the largest staleness of a token, in versions (formula: config/schedule.py)."""
        if self.sites is None or self.sites.window is None:
            return self.kind.bound(self.batch_size)
        return self.sites.window

    @property
    def most_unscored(self) -> int:
        """Returns how many prompts may be admitted and not scored: open admission fills slots."""
        return self.sites.slots if self.sites and self.takes_first_arrived else sys.maxsize

    @property
    def most_too_old(self) -> int:
        """Returns how many groups in a row may be dropped because they are too old."""
        return (
            0 if self.sites is None else ROUNDS_TOO_OLD * ceil(self.sites.slots / self.group_size)
        )

    @property
    def takes_first_arrived(self) -> bool:
        """Returns whether a batch is what arrived first (open admission)."""
        return self.sites is not None and self.sites.window is not None

    @property
    def in_flight(self) -> InFlight:
        """Returns what a weight sync does with responses that are being sampled."""
        return self.kind.in_flight if self.sites is None else "in_place"

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


def make_schedule(config: Config) -> Schedule:
    """Make the schedule of a whole run."""
    groups, by_site = config.selection.groups, config.site_slots
    group_size = config.rollout.group_size if config.estimator.reads_groups else 1
    slots = sum(by_site.values())
    # all slots are full while at every site members of a group wait for some
    asked_for = slots + len(by_site) * group_size
    window = config.sites.max_staleness if config.sites.is_open else None
    spread = groups if isinstance(groups, RewardSpread) else None
    most = config.rollout.concurrency
    if config.environment is not None:  # turns take slots, which a waiting trajectory leaves free
        most = sys.maxsize
    distils, by_turn = config.estimator.distils, config.estimator.credit == "turn"
    return Schedule(
        updates=config.run.max_steps,
        batch_size=config.buffer.batch_size,
        kind=config.schedule,
        rollout_slots=asked_for or most,
        score_slots=config.scoring.concurrency,
        group_size=group_size,
        groups=None if spread is None else GroupRule(spread, distils, by_turn),
        plan=batch_plan(config.schedule, config.run.seed, config.run.max_steps),
        sites=SiteSchedule(slots, window) if slots else None,
    )
