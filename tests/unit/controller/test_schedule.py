"""What must hold of every schedule, on the real controller over random runs (buffer/permits.py)."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks.schedule_properties import outcome
from checks.schedule_properties.checks import Leg, check, run_of
from checks.schedule_properties.plans import Plan
from megatron_opd.controller.schedule import Schedule
from tests.support.schedules import planned


def checked(schedule: Schedule, **times: Any) -> Leg:
    """The one leg of a run in which nothing fails; rollout_s, ...: see Plan."""
    legs = run_of(Plan(schedule, **times))
    check(legs)
    return legs[0]


@pytest.mark.parametrize(
    ("every", "ahead", "permits", "bound"),
    [
        (1, 0.0, 8, 0),
        (1, 0.5, 12, 1),
        (1, 1.0, 16, 1),
        (1, 3.0, 32, 3),
        (4, 0.0, 32, 3),
        (4, 0.25, 40, 4),
        (4, 0.5, 48, 5),
        (2, 0.1, 17, 2),
    ],
)
@pytest.mark.parametrize("order", ["admission", "completion"])
def test_the_bound_is_tight(every: int, ahead: float, permits: int, bound: int, order: str):
    """Sampling is so quick that all permits are taken at once."""
    age = None if order == "admission" else bound
    keys = {"sync_every": every, "order": order, "max_age": age}
    schedule = planned(3 * bound + 4, 8, ahead, 64, 64, **keys)
    assert (schedule.permits, schedule.bound) == (permits, bound)
    run = checked(schedule, rollout_s=lambda uid: 0.001, score_s=lambda uid: 0.001)
    assert max(run.staleness) == bound
    assert run.witness.most_permits == permits


def test_stragglers_hold_up_admission_order_and_not_completion_order():
    """One response in a hundred takes a hundred times as long."""

    def took_s(**keys: Any) -> tuple[float, Leg]:
        run = checked(
            planned(60, 8, 3.0, 32, 32, **keys),
            rollout_s=lambda uid: 20.0 if uid % 100 == 50 else 0.2,
            train_s=lambda update: 0.5,
        )
        return run.seconds, run

    in_order_s, _ = took_s()
    as_finished_s, run = took_s(order="completion", max_age=24)
    assert as_finished_s < 0.7 * in_order_s
    assert 3 < max(run.staleness) <= 24
    # with the bound of admission order there is nothing to overtake with
    tight_s, _ = took_s(order="completion", max_age=3)
    assert tight_s == pytest.approx(in_order_s, rel=0.05)


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_every_schedule_keeps_its_promises(seed: int):
    """Of `python -m checks schedule_properties`, which makes 100,000 of them."""
    _, figures = outcome(seed)
    assert "cause" not in figures
