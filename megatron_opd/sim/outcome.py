"""Holds what came of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Accounting


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
