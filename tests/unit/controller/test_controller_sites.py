"""Schedules of sampler sites: old samples are dropped, open admission keeps its window."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.buffer.permits import staleness_versions
from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.config.sites import open_permits
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.schedule import ROUNDS_TOO_OLD, SiteSchedule
from megatron_opd.records.drops import TOO_STALE
from megatron_opd.records.types import Prompt, Rollout, VersionSpan
from megatron_opd.sim.clock import run_virtual
from megatron_opd.sites.dispatcher import TooLate
from tests.support.fakes import (
    Fleet,
    Learner,
    Teacher,
    WeightSyncer,
    Witness,
    make_rollout,
    prompts,
)
from tests.support.schedules import planned


class Lagging(Fleet):
    """Sites in one: samples a prompt with weights that are `lag` versions behind the live ones."""

    def __init__(self, lag, seconds, slots):
        super().__init__()
        self.lag, self.seconds, self.slots = lag, seconds, slots
        self.most = 0

    async def generate(self, prompt: Prompt) -> Rollout:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        version = max(0, self.version - self.lag(prompt.uid))
        await asyncio.sleep(self.seconds(prompt.uid))
        self.in_flight -= 1
        return make_rollout(prompt, (VersionSpan(version, 0, 4),))


def ran(schedule, fleet, train_s=1.0):
    learner = Learner(duration_s=lambda update: train_s)
    sync, witness = WeightSyncer(fleet, learner), Witness()
    teacher = Teacher(duration_s=lambda uid: 0.0)
    controller = Controller(schedule, Ports(prompts(), fleet, teacher, learner, sync, witness))
    accounting = run_virtual(controller.run())
    return accounting, learner.batches


def with_sites(updates, batch, slots, window, group=1, sync_every=1, staleness=1):
    schedule = planned(updates, batch, staleness, slots, slots, group, sync_every=sync_every)
    return replace(schedule, sites=SiteSchedule(slots, window))


def staleness(batches):
    return [[staleness_versions(s, b.version) for s in b.samples] for b in batches]


LAGS = st.lists(st.integers(0, 4), min_size=1, max_size=5)
TIMES = st.lists(st.floats(0.05, 6.0), min_size=1, max_size=5)


@settings(max_examples=60)
@given(
    slots=st.integers(1, 8),
    per_batch=st.integers(1, 3),
    group=st.integers(1, 2),
    window=st.integers(2, 6),
    lags=LAGS,
    times=TIMES,
    every=st.integers(1, 3),
)
def test_open_admission_keeps_its_bounds(slots, per_batch, group, window, lags, times, every):
    slots, batch = max(slots, group), per_batch * group
    fleet = Lagging(
        lambda uid: min(lags[uid % len(lags)], window - every + 1),
        lambda uid: times[uid % len(times)],
        slots,
    )
    accounting, batches = ran(with_sites(6, batch, slots, window, group, every), fleet)
    assert accounting.updates == 6
    assert accounting.in_flight == 0
    assert accounting.admitted == accounting.consumed + sum(accounting.dropped.values())
    assert fleet.most <= slots
    assert max(max(each) for each in staleness(batches)) <= window
    for each in batches:  # whole groups
        members = [s.rollout.prompt.uid // group for s in each.samples]
        assert all(members.count(number) == group for number in members)


def test_a_batch_is_what_arrived_first_not_what_was_admitted_first():
    fleet = Lagging(lambda uid: 0, lambda uid: 9.5 if uid == 0 else 1.0, 4)
    _, batches = ran(with_sites(3, 2, 4, 16), fleet)
    uids = [s.rollout.prompt.uid for b in batches for s in b.samples]
    assert 0 not in uids[:4]
    assert uids[:2] == [1, 2]


def test_sites_always_have_their_slots_full_while_the_learner_keeps_up():
    fleet = Lagging(lambda uid: 0, lambda uid: 1.0, 5)
    ran(with_sites(8, 2, 5, 4), fleet, train_s=0.1)
    assert fleet.most == 5


def test_no_more_is_admitted_than_the_window_can_use():
    """A learner that is slow does not let samples pile up without end."""
    fleet = Lagging(lambda uid: 0, lambda uid: 0.01, 3)
    schedule = with_sites(3, 2, 3, 2)
    accounting, batches = ran(schedule, fleet, train_s=50.0)
    assert schedule.permits == open_permits(2, 1, 3, 2, 1) == 4 + (2 + 1 + 1) * 2
    assert accounting.admitted <= 3 * schedule.permits
    assert max(max(each) for each in staleness(batches)) <= 2


def test_what_gets_old_while_it_waits_is_dropped_as_too_stale():
    # the learner takes the first two of many that all came with version 0
    fleet = Lagging(lambda uid: 0, lambda uid: 0.01, 8)
    accounting, batches = ran(with_sites(6, 2, 8, 1), fleet, train_s=5.0)
    assert accounting.dropped[TOO_STALE] > 0
    assert max(max(each) for each in staleness(batches)) <= 1


def test_a_group_with_one_old_member_goes_as_a_whole():
    fleet = Lagging(lambda uid: 9 if uid % 4 == 1 else 0, lambda uid: 0.3, 4)
    accounting, batches = ran(with_sites(6, 2, 4, 1, group=2), fleet)
    assert set(accounting.dropped) <= {TOO_STALE, "group_incomplete"}
    assert accounting.dropped[TOO_STALE] > 0
    assert max(max(each) for each in staleness(batches)) <= 1


@pytest.mark.parametrize("kind", [{}, {"order": "completion"}])
def test_with_permits_a_site_that_lags_breaks_no_bound(kind):
    """The proof needs engines at the live version; sites are not."""
    schedule = planned(8, 2, 1, 4, 4, **kind)
    schedule = replace(schedule, sites=SiteSchedule(4))
    fleet = Lagging(lambda uid: uid % 3, lambda uid: 0.5, 4)
    accounting, batches = ran(schedule, fleet)
    assert accounting.updates == 8
    assert accounting.dropped[TOO_STALE] > 0
    assert max(max(each) for each in staleness(batches)) <= schedule.bound


def test_a_run_whose_samples_are_all_too_old_ends_with_the_cause():
    schedule = replace(planned(40, 2, 1, 4, 4), sites=SiteSchedule(4))
    fleet = Lagging(lambda uid: 99, lambda uid: 0.5, 4)
    with pytest.raises(
        LoopFailed,
        match=r"32 samples in a row were dropped, the last for too_stale.*raise sites\.max_st",
    ):
        ran(schedule, fleet)


def test_a_weight_sync_waits_for_no_site():
    schedule = planned(2, 2, 1, 4, 4, in_flight="keep")
    assert schedule.in_flight == "keep"
    assert replace(schedule, sites=SiteSchedule(4)).in_flight == "in_place"


class Returning(Lagging):
    """Sites whose samples of these prompts took too long to come."""

    def __init__(self, late, slots):
        super().__init__(lambda uid: 0, lambda uid: 0.5, slots)
        self.late = late

    async def generate(self, prompt: Prompt) -> Rollout:
        rollout = await super().generate(prompt)
        if prompt.uid in self.late:
            raise TooLate(f"prompt {prompt.uid}")
        return rollout


SLOTS, ROUND = 12, 12
MOST = ROUNDS_TOO_OLD * ROUND


@pytest.mark.parametrize("lost", [ROUND, 2 * ROUND, MOST - 1])
def test_sites_that_come_back_with_old_samples_alone_end_no_run(lost):
    """Of the limit of other drops, the permits, this is several times as much."""
    schedule = with_sites(6, 2, SLOTS, 2)
    fleet = Returning(range(4, 4 + lost), SLOTS)
    accounting, _ = ran(schedule, fleet)
    assert schedule.permits < MOST - 1
    assert (accounting.updates, accounting.dropped["too_late"]) == (6, lost)


def test_every_complete_group_begins_the_count_anew():
    late = [uid for uid in range(4, 4 + 3 * MOST) if uid % (MOST - 12)]
    accounting, _ = ran(with_sites(5, 2, SLOTS, 2), Returning(late, SLOTS))
    assert accounting.updates == 5
    assert accounting.dropped["too_late"] > MOST


@pytest.mark.parametrize("group", [1, 4])
def test_a_run_whose_samples_all_come_too_late_ends_with_the_bound_and_the_remedy(group):
    """A group that is lost counts once, whatever becomes of its members."""
    schedule = with_sites(6, 4, SLOTS, 2, group)
    what, most = ("samples", MOST) if group == 1 else ("groups", MOST // group)
    line = f"{most} {what} in a row were dropped, the last for too_late: prompt .*max_delay_s"
    with pytest.raises(LoopFailed, match=rf"EverythingDropped: {line}"):
        ran(schedule, Returning(range(10**6), SLOTS))


def test_old_samples_hide_no_drops_for_other_reasons():
    class Broken(Returning):
        async def generate(self, prompt):
            rollout = await super().generate(prompt)
            if prompt.uid % 2:
                raise RolloutRejected("empty_response")
            return rollout

    schedule = with_sites(6, 2, SLOTS, 2)
    line = f"{schedule.permits} samples in a row were dropped, the last for empty_response"
    with pytest.raises(LoopFailed, match=line):
        ran(schedule, Broken(range(0, 10**6, 2), SLOTS))
