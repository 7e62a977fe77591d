"""The staleness rule of buffer/permits.py, on the real controller over random schedules."""

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.buffer.permits import (
    PermitError,
    Permits,
    StalenessExceeded,
    check_staleness,
    staleness_versions,
)
from megatron_opd.buffer.rejection import RolloutRejected, ScoreRejected
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.controller.ports import Ports
from megatron_opd.records.types import Batch
from megatron_opd.sim.clock import run_virtual
from tests.support.fakes import Fleet, Learner, Teacher, WeightSyncer, Witness, make_sample, prompts
from tests.support.schedules import planned, random_schedules


def test_permits_are_bounded_and_counted():
    async def scenario():
        permits = Permits(4)
        for uid in range(4):
            await permits.acquire(uid)
        assert permits.in_use == permits.total == 4
        waiter = asyncio.create_task(permits.acquire(4))
        await asyncio.sleep(1)
        assert not waiter.done()
        permits.release([1])
        await waiter
        assert permits.in_use == 4

    run_virtual(scenario())


def test_a_permit_is_neither_doubled_nor_returned_twice():
    async def scenario():
        permits = Permits(2)
        await permits.acquire(7)
        with pytest.raises(PermitError, match="prompt 7 already"):
            await permits.acquire(7)
        permits.release([7])
        with pytest.raises(PermitError, match="prompt 7 returns"):
            permits.release([7])

    run_virtual(scenario())


def test_a_cancelled_wait_takes_no_permit():
    async def scenario():
        permits = Permits(1)
        await permits.acquire(0)
        waiter = asyncio.create_task(permits.acquire(1))
        await asyncio.sleep(1)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        permits.release([0])
        await permits.acquire(2)
        assert permits.in_use == 1

    run_virtual(scenario())


def test_check_refuses_samples_too_old_and_from_the_future():
    batch = Batch(update=5, version=5, samples=(make_sample(0, 5), make_sample(1, 3)))
    assert staleness_versions(batch.samples[1], batch.version) == 2
    check_staleness(batch, 2)
    with pytest.raises(StalenessExceeded, match="sample 1 of update 5 is 2 versions old"):
        check_staleness(batch, 1)
    with pytest.raises(StalenessExceeded, match="newer than the learner"):
        check_staleness(Batch(0, 2, (make_sample(0, 3),)), 4)


def random_run(seed, schedule, *, drop_rate, spread, controller=Controller):
    """One run with log-normal durations, exponents widened by `spread`."""
    random_ = random.Random(seed)
    durations = [random_.lognormvariate(0, 1) ** spread for _ in range(10_000)]
    dropped = [random_.random() for _ in range(10_000)]

    def fails(kind, low):
        return lambda uid: kind("planned") if low <= dropped[uid] < low + drop_rate else None

    fleet = Fleet(lambda uid: durations[uid], fails(RolloutRejected, 0.0))
    teacher = Teacher(lambda uid: durations[uid + 5000] / 2, fails(ScoreRejected, 0.5))
    learner = Learner(lambda update: durations[update + 2000])
    weight_sync = WeightSyncer(fleet, learner, lambda version: durations[version + 3000] / 4)
    witness = Witness()
    ports = Ports(prompts(), fleet, teacher, learner, weight_sync, witness)
    running = controller(schedule, ports)
    accounting = run_virtual(running.run())
    assert running._permits.in_use == 0, "a permit was lost"
    return accounting, learner.batches, witness


def uids_of(batch):
    return [sample.rollout.prompt.uid for sample in batch.samples]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    schedule=random_schedules(groups=6, group_sizes=(1, 1, 2, 3, 4), slots=40),
    drop_rate=st.sampled_from([0.0, 0.03, 0.1]),
    spread=st.integers(0, 3),
)
def test_the_bound_holds_and_nothing_is_lost(seed, schedule, drop_rate, spread):
    updates, batch_size, group_size = schedule.updates, schedule.batch_size, schedule.group_size
    tau = int(schedule.kind.max_staleness)
    # 16 drops in a row would end the run
    drop_rate /= group_size
    accounting, batches, witness = random_run(seed, schedule, drop_rate=drop_rate, spread=spread)
    staleness = [staleness_versions(s, batch.version) for batch in batches for s in batch.samples]
    assert max(staleness) <= tau
    assert min(staleness) >= 0
    # every admitted prompt was trained on once or dropped once
    trained = [uid for batch in batches for uid in uids_of(batch)]
    dropped = [uid for uid, _ in witness.drops]
    assert sorted(trained + dropped) == witness.admitted_uids == sorted(set(trained + dropped))
    assert trained == sorted(trained), "batches are in admission order"
    assert [len(batch.samples) for batch in batches] == [batch_size] * updates
    assert [batch.version for batch in batches] == list(range(updates))
    for batch in batches:
        members = Counter(uid // group_size for uid in uids_of(batch))
        assert set(members.values()) == {group_size}, "batches hold whole groups"
    assert accounting.in_flight == 0
    assert accounting.consumed == updates * batch_size
    assert accounting.dropped == Counter(reason for _, reason in witness.drops)
    assert set(accounting.dropped) <= {"planned", "group_incomplete"}
    planned = {uid // group_size for uid, reason in witness.drops if reason == "planned"}
    assert {uid // group_size for uid in dropped} == planned, "a broken group lost a member itself"
    assert witness.depths[-1].permits_in_use <= (tau + 1) * batch_size


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tau=st.integers(0, 5),
    group_size=st.sampled_from([1, 2]),
    drop_rate=st.sampled_from([0.0, 0.1]),
    slots=st.integers(1, 20),
)
def test_holding_back_tau_batches_makes_the_staleness_exact(
    seed, tau, group_size, drop_rate, slots
):
    schedule = planned(tau + 4, 4, tau, slots, slots, group_size, hold_batches=tau)
    _, batches, _ = random_run(seed, schedule, drop_rate=drop_rate, spread=2)
    for k, batch in enumerate(batches):
        (span,) = {sample.rollout.spans for sample in batch.samples}
        (version,) = {part.version for part in span}
        assert k - version == min(k, tau)


def test_holding_back_more_than_the_permits_allow_stalls(monkeypatch: pytest.MonkeyPatch):
    """Why hold_batches is bounded by max_staleness."""
    monkeypatch.setattr("megatron_opd.config.schedule._held", lambda schedule: None)
    with pytest.raises(RuntimeError, match="deadlock"):
        random_run(0, planned(9, 2, 1, 9, 9, hold_batches=2), drop_rate=0, spread=0)


class KeepsScoredMembers(Controller):
    """Broken on purpose: the scored members of a broken group stay in the line."""

    def __init__(self, schedule, ports):
        super().__init__(schedule, ports)
        self._buffer.withdraw = lambda uids: []


def test_keeping_the_scored_members_of_a_broken_group_is_noticed():
    schedule = planned(6, 4, 2, 3, 3, group_size=2)
    _, batches, _ = random_run(1, schedule, drop_rate=0.1, spread=2, controller=KeepsScoredMembers)
    members = Counter(uid // 2 for batch in batches for uid in uids_of(batch))
    assert 1 in members.values()


def fast_ports(fleet, learner):
    """Everything a run needs, with a teacher that scores at once."""
    teacher = Teacher(lambda uid: 0.001)
    return Ports(prompts(), fleet, teacher, learner, WeightSyncer(fleet, learner), Witness())


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_the_bound_is_tight(tau):
    # the fleet is fast: everything the permits allow is finished at the oldest version
    fleet = Fleet(lambda uid: 0.001)
    learner = Learner()
    schedule = planned(8, 3, tau, 64, 64)
    ports = fast_ports(fleet, learner)
    run_virtual(Controller(schedule, ports).run())
    oldest = [
        max(staleness_versions(s, batch.version) for s in batch.samples)
        for batch in learner.batches
    ]
    assert max(oldest) == tau
    assert oldest == [min(k, tau) for k in range(8)]


class ReleasesTooEarly(Controller):
    """Broken on purpose: permits return when a batch is taken, before its version is live."""

    async def _learn(self):
        real = self._batcher.next_batch

        async def next_batch():
            samples = await real()
            Permits.release(self._permits, [s.rollout.prompt.uid for s in samples])
            return samples

        self._batcher.next_batch = next_batch
        # nothing is dropped in this run: every later call comes from the weight sync
        self._permits.release = list
        await super()._learn()


def test_releasing_at_consumption_breaks_the_bound_and_is_caught():
    fleet = Fleet(lambda uid: 0.001)
    learner = Learner()
    ports = fast_ports(fleet, learner)
    with pytest.raises(LoopFailed, match="StalenessExceeded: sample 4 of update 2 is 2 versions"):
        run_virtual(ReleasesTooEarly(planned(8, 2, 1, 64, 64), ports).run())


class TakesWhatFinishedFirst(Controller):
    """Broken on purpose: batches in completion order."""

    def __init__(self, schedule, ports):
        super().__init__(schedule, ports)
        buffer, line = self._buffer, self._buffer._line

        def put(sample):
            uid = sample.rollout.prompt.uid
            del line[uid]
            buffer._ready.append(sample)
            buffer.waiting_for_score -= 1
            buffer._advance()

        buffer.put = put


def test_completion_order_breaks_the_bound_and_is_caught():
    # prompt 0 takes as long as ten updates
    fleet = Fleet(lambda uid: 20.0 if uid == 0 else 0.01)
    learner = Learner()
    ports = Ports(prompts(), fleet, Teacher(), learner, WeightSyncer(fleet, learner), Witness())
    with pytest.raises(LoopFailed, match="StalenessExceeded: sample 0 "):
        run_virtual(TakesWhatFinishedFirst(planned(30, 2, 1, 64, 64), ports).run())
