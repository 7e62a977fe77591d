"""Schedules in one line."""

from typing import Any

from megatron_opd.config.schedule import ScheduleConfig
from megatron_opd.controller.schedule import Schedule


def planned(
    updates: int,
    batch_size: int,
    max_staleness: float,
    rollout_slots: int = 16,
    score_slots: int = 16,
    group_size: int = 1,
    **kind: Any,
) -> Schedule:
    """A schedule of so many updates; kind: keys of its section."""
    numbers = ScheduleConfig(max_staleness=float(max_staleness), **kind)
    return Schedule(updates, batch_size, numbers, rollout_slots, score_slots, group_size)
