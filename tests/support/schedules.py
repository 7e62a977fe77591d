"""Schedules in one line."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

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


@st.composite
def random_schedules(
    draw: st.DrawFn, groups: int, group_sizes: Sequence[int], slots: int
) -> Schedule:
    """Up to 8 updates of up to so many groups, at most 4 versions old, in up to so many slots."""
    group_size, tau = draw(st.sampled_from(group_sizes)), draw(st.integers(0, 4))
    updates, in_flight = draw(st.integers(1, 8)), draw(st.integers(1, slots))
    batch_size = group_size * draw(st.integers(1, groups))
    hold = draw(st.integers(0, tau))
    return planned(updates, batch_size, tau, in_flight, in_flight, group_size, hold_batches=hold)
