"""Batches by plan: which samples each update gets, on the buffer and on the real controller."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks.schedule_properties.checks import check, run_of
from checks.schedule_properties.plans import Plan, plan_of
from megatron_opd.buffer.planned import BatchPlan, PlannedBuffer
from megatron_opd.config.delays import DelayConfig
from megatron_opd.controller.schedule import Schedule
from megatron_opd.records.types import AnySample
from tests.support.fakes import make_sample
from tests.support.schedules import planned

DRAWN = DelayConfig(type="exponential", low_s=0.0, high_s=1.0)


def uids(samples: tuple[AnySample, ...]) -> list[int]:
    return [sample.rollout.prompt.uid for sample in samples]


def filled(buffer: PlannedBuffer, first: int, count: int, version: int) -> None:
    for uid in range(first, first + count):
        buffer.admit(uid, version)
    for uid in reversed(range(first, first + count)):
        buffer.put(make_sample(uid))


def test_a_plan_counts_the_batches_of_versions():
    plan = BatchPlan((0, 0, 2, 1, 2))
    assert [plan.batches_by(version) for version in range(4)] == [2, 3, 5, 5]


def test_each_update_gets_the_batch_that_was_sampled_for_it():
    """Version 0 samples for updates 0, 1 and 3, version 2 for update 2, version 3 for 4."""
    buffer = PlannedBuffer(2, BatchPlan((0, 0, 2, 0, 3)))
    filled(buffer, 0, 6, 0)
    assert uids(buffer.take(2)) == [0, 1]
    assert uids(buffer.take(2)) == [2, 3]
    assert buffer.ready == 0, "version 2's samples are not there"
    filled(buffer, 6, 2, 2)
    assert uids(buffer.take(2)) == [6, 7], "while an older batch waits"
    filled(buffer, 8, 2, 3)
    assert uids(buffer.take(2)) == [4, 5]
    assert uids(buffer.take(2)) == [8, 9]


def test_nothing_is_ready_while_something_is_not_scored():
    buffer = PlannedBuffer(1, BatchPlan((0, 0)))
    buffer.admit(0, 0)
    buffer.admit(1, 0)
    buffer.put(make_sample(0))
    assert buffer.ready == 0
    with pytest.raises(ValueError, match="1 samples were asked for, 0 are ready"):
        buffer.take(1)
    buffer.close()
    assert buffer.ready == 0, "what comes last may be of the first batch"
    buffer.put(make_sample(1))
    assert uids(buffer.take(1)) == [0]


def test_what_is_put_back_is_taken_again():
    buffer = PlannedBuffer(2, BatchPlan((0, 1, 0)))
    filled(buffer, 0, 4, 0)
    buffer.take(2)
    filled(buffer, 4, 2, 1)
    taken = buffer.take(2)
    assert uids(taken) == [4, 5]
    buffer.put_back(taken)
    assert uids(buffer.take(2)) == [4, 5]
    assert uids(buffer.take(2)) == [2, 3]


def test_prompts_that_end_early_leave_the_oldest():
    buffer = PlannedBuffer(2, BatchPlan((0, 1, 0, 1)))
    filled(buffer, 0, 4, 0)
    assert uids(buffer.take(2)) == [0, 1]
    buffer.close()
    assert uids(buffer.take(2)) == [2, 3]
    assert buffer.exhausted
    assert buffer.ready == 0


# ------------------------------------------------------------ on the real controller


def drawn(schedule: Schedule, most: int, seed: int) -> Schedule:
    rng = random.Random(seed)
    sources = tuple(max(0, k - rng.randint(0, most)) for k in range(schedule.updates))
    return replace(schedule, plan=BatchPlan(sources))


def test_every_token_of_a_batch_is_of_the_version_that_was_planned():
    schedule = drawn(planned(30, 4, 6, 8, 8, type="controlled", delays=DRAWN), 6, seed=3)
    (leg,) = run_of(Plan(schedule, rollout_s=lambda uid: 0.1 + uid % 7, servers=3))
    check([leg])
    assert schedule.plan is not None
    for batch in leg.witness.batches:
        versions = {span.version for s in batch.samples for span in s.rollout.spans}
        assert versions == {schedule.plan.sources[batch.update]}
    ages = Counter(leg.staleness)
    assert set(ages) == set(range(7)), "all that can be drawn are seen"
    trained = [rollout.prompt.uid for rollout in leg.rollouts]
    assert sorted(trained) == list(range(120)), "each prompt once, and none in vain"


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_drawn_staleness_keeps_every_promise(seed: int):
    """Random runs with drops, faults, slow syncs, early ends and resumes; see plan_of."""
    plan = plan_of(seed)
    size, ahead = plan.schedule.batch_size, seed % 4
    group = plan.schedule.group_size
    base = planned(plan.schedule.updates, size, ahead, 9, 9, group, type="controlled", delays=DRAWN)
    schedule = drawn(base, ahead, seed)
    legs = run_of(replace(plan, schedule=schedule))
    check(legs)
    assert schedule.plan is not None
    if plan.prompts is not None:
        return  # where they end, the oldest fill what is missing
    for leg in legs:
        for batch in leg.witness.batches:
            versions = {span.version for s in batch.samples for span in s.rollout.spans}
            assert versions == {schedule.plan.sources[batch.update]}
