"""What must hold of every schedule, on the real controller over random runs (buffer/permits.py)."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.buffer.permits import staleness_versions
from megatron_opd.buffer.rejection import RolloutRejected, ScoreRejected
from megatron_opd.config.schedule import least_bound
from megatron_opd.controller.controller import MIN_DROPS_IN_A_ROW, Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.schedule import Schedule
from megatron_opd.metrics.types import Accounting, WeightSyncReport
from megatron_opd.sim.clock import run_virtual
from megatron_opd.types import LearnerTurn, Rollout
from tests.support.fakes import Fleet, Learner, Teacher, WeightSyncer, Witness, prompts
from tests.support.schedules import planned


class Syncer(WeightSyncer):
    """Notes which rollouts were in flight when it began."""

    async def sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        self.in_flight_at = [*getattr(self, "in_flight_at", []), self.fleet.in_flight]
        return await super().sync(version, turn)


@dataclass
class Run:
    schedule: Schedule
    accounting: Accounting
    witness: Witness
    sync: Syncer
    controller: Controller

    @property
    def rollouts(self) -> list[Rollout]:
        return [sample.rollout for batch in self.witness.batches for sample in batch.samples]

    @property
    def staleness(self) -> list[int]:
        return [
            staleness_versions(sample, batch.version)
            for batch in self.witness.batches
            for sample in batch.samples
        ]


def run_of(
    schedule: Schedule,
    *,
    rollout_s=lambda uid: 1.0,
    train_s=lambda update: 0.5,
    score_s=lambda uid: 0.1,
    fails=lambda uid: None,
    score_fails=lambda uid: None,
    count: int | None = None,
) -> Run:
    fleet, learner, witness = Fleet(rollout_s, fails), Learner(train_s), Witness()
    sync = Syncer(fleet, learner)
    ports = Ports(prompts(count), fleet, Teacher(score_s, score_fails), learner, sync, witness)
    controller = Controller(schedule, ports)
    return Run(schedule, run_virtual(controller.run()), witness, sync, controller)


def check(run: Run) -> None:
    """Everything that holds of a schedule whatever happens."""
    schedule, accounting, batches = run.schedule, run.accounting, run.witness.batches
    size = schedule.batch_size
    assert accounting.updates == len(batches) == schedule.updates
    assert accounting.admitted == accounting.consumed + sum(accounting.dropped.values())
    assert accounting.in_flight == run.controller._permits.in_use == 0
    uids = [rollout.prompt.uid for rollout in run.rollouts]
    assert len(uids) == len(set(uids)) == accounting.consumed == schedule.updates * size
    assert max(run.staleness) <= schedule.bound
    assert all(batch.version == batch.update for batch in batches)
    kind, every = schedule.kind, schedule.kind.sync_every
    synced = [u for u in range(1, schedule.updates + 1) if u % every == 0 or u == schedule.updates]
    assert run.sync.synced == synced
    assert run.witness.unsynced == schedule.updates - len(synced)
    assert all(depths.permits_in_use <= schedule.permits for depths in run.witness.depths)
    for batch in batches:
        groups = Counter(s.rollout.prompt.uid // schedule.group_size for s in batch.samples)
        assert set(groups.values()) == {schedule.group_size}
    if kind.order == "admission":
        assert uids == sorted(uids)
    if kind.in_flight != "in_place":
        assert set(run.sync.in_flight_at) == {0}
        assert {len(rollout.spans) for rollout in run.rollouts} == {1}
    if kind.in_flight == "keep":
        assert all(rollout.restarts == 0 for rollout in run.rollouts)


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
    run = run_of(schedule, rollout_s=lambda uid: 0.001, score_s=lambda uid: 0.001)
    check(run)
    assert max(run.staleness) == bound
    assert max(depths.permits_in_use for depths in run.witness.depths) == permits


def test_stragglers_hold_up_admission_order_and_not_completion_order():
    """One response in a hundred takes a hundred times as long."""

    def took_s(**keys: Any) -> tuple[float, Run]:
        run = run_of(
            planned(60, 8, 3.0, 32, 32, **keys),
            rollout_s=lambda uid: 20.0 if uid % 100 == 50 else 0.2,
            train_s=lambda update: 0.5,
        )
        check(run)
        return run.witness.reports[-1].finished_s, run

    in_order_s, _ = took_s()
    as_finished_s, run = took_s(order="completion", max_age=24)
    assert as_finished_s < 0.7 * in_order_s
    assert 3 < max(run.staleness) <= 24
    # with the bound of admission order there is nothing to overtake with
    tight_s, _ = took_s(order="completion", max_age=3)
    assert tight_s == pytest.approx(in_order_s, rel=0.05)


@settings(max_examples=500, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    updates=st.integers(1, 9),
    groups=st.integers(1, 3),
    group_size=st.sampled_from([1, 1, 2, 3]),
    every=st.integers(1, 4),
    ahead=st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.7, 3.0]),
    in_flight=st.sampled_from(["in_place", "keep", "abort"]),
    order=st.sampled_from(["admission", "completion"]),
    slack=st.integers(0, 3),
    hold=st.integers(0, 9),
    slots=st.integers(1, 24),
    drop_rate=st.sampled_from([0.0, 0.1]),
    tail=st.sampled_from([1.0, 30.0]),
)
def test_every_schedule_keeps_its_promises(
    seed, updates, groups, group_size, every, ahead, in_flight, order, slack, hold, slots,
    drop_rate, tail,
):  # fmt: skip
    rng = random.Random(seed)
    batch_size = groups * group_size
    keys: dict[str, Any] = {"sync_every": every, "in_flight": in_flight, "order": order}
    if order == "admission":
        keys["hold_batches"] = min(hold, int(ahead * every))
    else:
        keys["max_age"] = least_bound(batch_size, every, ahead) + slack
    schedule = planned(
        updates,
        batch_size,
        ahead,
        slots,
        slots,
        group_size=group_size,
        **keys,
    )
    lucky = random.Random(seed + 1)
    drops = iter(range(MIN_DROPS_IN_A_ROW - 1))  # one more in a row would end the run, rightly

    def unlucky() -> bool:
        return lucky.random() < drop_rate and next(drops, None) is not None

    pace = {"rollout": rng.uniform(0.1, 3), "score": rng.uniform(0.01, 2), "train": rng.random()}
    check(
        run_of(
            schedule,
            rollout_s=lambda uid: pace["rollout"] * (tail if lucky.random() < 0.1 else 1.0),
            score_s=lambda uid: pace["score"] * lucky.random(),
            train_s=lambda update: pace["train"],
            fails=lambda uid: RolloutRejected("lost") if unlucky() else None,
            score_fails=lambda uid: ScoreRejected("nan") if unlucky() else None,
        )
    )
