"""Holds what came of a simulated run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_opd.config.roles import STUDENT
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Accounting
from sglang_bridge.fleet import Fleet


@dataclass(frozen=True, slots=True)
class SiteOutcome:
    """Holds what a site did. samples: that arrived in time. loads: versions that it took.

    idle_ratio: of its average student server.
    """

    samples: int
    loads: int
    idle_ratio: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds what came of a simulated run.

    wall_s: virtual seconds. tokens_per_s: response tokens trained on, after five updates; None: no
    more. *_idle_ratio: as in summary.json; teacher: of the average server, None without.
    staleness_*: in versions. busy: share of the time in which the learner, or the average server of
    a role, works. cause: why the run ended early; None: it made all its updates. sites: by name.
    """

    wall_s: float
    updates: int
    samples: int
    samples_per_s: float
    tokens_per_s: float | None
    updates_per_hour: float
    learner_idle_ratio: float | None
    rollout_idle_ratio: float | None
    teacher_idle_ratio: float | None
    staleness_mean: float | None
    staleness_max: int | None
    staleness_bound: int
    busy: dict[str, float]
    servers_lost: dict[str, str]
    servers_restarted: int
    samples_readmitted: int
    requests_timed_out: int
    cause: str | None
    totals: RunTotals
    accounting: Accounting
    sites: dict[str, SiteOutcome]


def outcome_of(
    totals: RunTotals,
    accounting: Accounting,
    *,
    wall_s: float,
    bound: int,
    busy: dict[str, float],
    fleets: Collection[Fleet],
    supervisor: Supervisor | None,
    cause: str | None,
    sites: dict[str, SiteOutcome],
) -> Outcome:
    """Return the figures of a run that has ended."""
    times, tokens = totals.times, totals.staleness.tokens
    teachers = [share for role, share in busy.items() if role != STUDENT]
    idle = times.learner_idle_ratio()
    return Outcome(
        wall_s=wall_s,
        updates=accounting.updates,
        samples=accounting.consumed,
        samples_per_s=accounting.consumed / wall_s,
        tokens_per_s=totals.throughput.tokens_per_s(),
        updates_per_hour=3600 * accounting.updates / wall_s,
        learner_idle_ratio=idle,
        rollout_idle_ratio=times.fleet_idle_ratio(),
        teacher_idle_ratio=1 - sum(teachers) / len(teachers) if teachers else None,
        staleness_mean=tokens.mean,
        staleness_max=tokens.max,
        staleness_bound=bound,
        busy=busy | ({} if idle is None else {"learner": 1 - idle}),
        servers_lost={} if supervisor is None else supervisor.lost,
        servers_restarted=0 if supervisor is None else supervisor.restarted.total(),
        samples_readmitted=sum(fleet.restarted for fleet in fleets),
        requests_timed_out=sum(fleet.timed_out for fleet in fleets),
        cause=cause,
        totals=totals,
        accounting=accounting,
        sites=sites,
    )
