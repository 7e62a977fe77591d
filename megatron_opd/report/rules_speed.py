"""Finds out who waits for whom, and what pauses cost."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_opd.report.facts import FEW_UPDATES, Facts, Finding
from megatron_opd.report.series import Table

IDLE = 0.3
"""Share of the time from which a waiting learner or fleet is worth a change."""
LIMITS = 0.5
"""Share of the samples under way that are at the teacher from which all else waits for it."""
SYNCING = 0.2
"""Share of the time in which weight syncs pause the servers that is worth a change."""


def idle(facts: Facts) -> Iterator[Finding]:
    """Say who waits, and for whom."""
    if facts.figure("updates") < FEW_UPDATES:
        return
    learner = facts.figures.get("learner_idle_ratio", facts.figure("window_learner_idle"))
    fleet = facts.figures.get("fleet_idle_ratio", facts.figure("window_sampler_idle"))
    ahead = facts.key("schedule.max_staleness")
    at_teacher = _at_teacher(facts.run.table)
    answer_s, sampling_s = _turns(facts.run.table)
    if at_teacher >= LIMITS and learner >= IDLE:
        yield Finding(
            "warning",
            f"the teacher limits the run: {at_teacher:.0%} of the samples under way are at it, and "
            f"the learner is idle {learner:.0%}",
            f"raise {facts.key('teacher.servers')} or {facts.key('scoring.concurrency')}",
        )
    elif answer_s > sampling_s and learner >= IDLE:
        yield Finding(
            "warning",
            f"the environment limits the run: its answers take {answer_s:.1f} s of a trajectory, "
            f"the turns {sampling_s:.1f} s, and the learner is idle {learner:.0%}",
            f"let more trajectories be under way: raise {ahead} or "
            f"{facts.key('buffer.batch_size')}; or let the environment answer faster",
        )
    elif learner >= IDLE and fleet >= IDLE:
        yield Finding(
            "warning",
            f"learner and servers wait for each other: idle {learner:.0%} and {fleet:.0%}",
            f"let them work at once: raise {ahead}; weight_sync.overlap shortens pauses",
        )
    elif learner >= IDLE:
        yield Finding(
            "warning",
            f"learner idle {learner:.0%}: it waits for samples",
            f"add rollout servers, that is raise {facts.key('student.servers')}, or raise "
            f"{facts.key('rollout.concurrency')} or {ahead}",
        )
    elif fleet >= IDLE:
        yield Finding(
            "warning",
            f"rollout servers idle {fleet:.0%}: they wait for the learner",
            f"give the learner more GPUs, lower {facts.key('student.servers')}, or raise {ahead}",
        )


def _at_teacher(table: Table) -> float:
    """Return the share of the samples under way that wait for the teacher, or are at it."""
    scoring, under_way = table.values("scoring_samples"), table.values("permits_in_use")
    return float(scoring.sum() / under_way.sum()) if under_way.sum() > 0 else math.nan


def _turns(table: Table) -> tuple[float, float]:
    """Return the mean seconds of a trajectory's answers and turns; 0 where nothing answers.

    Turns with their waits for a slot: where servers are what all wait for, these are the longer.
    """
    answer_s, sampling_s = table.values("environment_s_mean"), table.values("turn_sampling_s_mean")
    if not len(answer_s) or not len(sampling_s):
        return 0.0, 0.0
    return float(answer_s.mean()), float(sampling_s.mean())


def syncing(facts: Facts) -> Iterator[Finding]:
    """Find weight syncs that cost much of the servers' time."""
    table = facts.run.table
    seconds, paused_s = facts.figure("elapsed_s"), float(table.values("pause_s").sum())
    if facts.figure("updates") >= FEW_UPDATES and seconds > 0 and paused_s >= SYNCING * seconds:
        yield Finding(
            "warning",
            f"weight syncs pause the servers {paused_s / seconds:.0%} of the time",
            f"set {facts.key('weight_sync.overlap')}, raise {facts.key('schedule.sync_every')}, or "
            f"another {facts.key('weight_sync.type')}",
        )
