"""The real controller where weight syncs release the learner, on fakes and a virtual clock."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.buffer.permits import staleness_versions
from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports, TakeState
from megatron_opd.controller.schedule import Schedule
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.controller.turn import Turn
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.records.types import Batch, LearnerTurn, Sample
from megatron_opd.sim.clock import run_virtual
from tests.support.fakes import Figures, Fleet, Learner, Teacher, WeightSyncer, Witness, prompts
from tests.support.schedules import planned, random_schedules

Span = tuple[float, float]


@dataclass
class TimedLearner(Learner):
    """Notes when it trained."""

    spans: list[Span] = field(default_factory=list)

    def prepare(self, sample: Sample) -> Sample:
        return sample

    async def train(self, batch: Batch) -> Figures:
        started_s = asyncio.get_running_loop().time()
        figures = await super().train(batch)
        self.spans.append((started_s, asyncio.get_running_loop().time()))
        return figures


@dataclass
class Releasing(WeightSyncer):
    """Releases the learner after `copy_s`; where `again`, a first try fails and a second begins."""

    copy_s: float = 0.01
    again: Callable[[int], bool] = lambda version: False
    spans: list[Span] = field(default_factory=list)
    under_way: bool = False

    async def sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        clock = asyncio.get_running_loop().time
        assert not self.under_way, "two weight syncs at once"
        assert not self.learner.busy, "the copy would be of no version"
        assert version == self.fleet.version + 1, "versions go live in order"
        self.under_way, started_s = True, clock()
        await asyncio.sleep(self.copy_s)
        turn.release()
        await asyncio.sleep(self.duration_s(version) / 2)
        if self.again(version):
            await turn.take_back()
            assert not self.learner.busy
            await asyncio.sleep(self.duration_s(version))
            assert not self.learner.busy, "an update began in a second try"
            turn.release()
        await asyncio.sleep(self.duration_s(version) / 2)
        self.fleet.version = version
        self.synced.append(version)
        self.spans.append((started_s, clock()))
        self.under_way = False
        report = WeightSyncReport(version, (), 1000, started_s, clock())
        return report


@dataclass
class Keeper:
    """Keeps the state after some updates, while nothing trains."""

    learner: Learner
    wanted: set[int] = field(default_factory=set)
    kept: dict[int, ControllerState] = field(default_factory=dict)

    def due(self, updates: int) -> bool:
        return updates in self.wanted

    async def after_update(self, updates: int, state: TakeState) -> None:
        assert not self.learner.busy
        self.kept[updates] = await state()
        await asyncio.sleep(1.0)
        assert not self.learner.busy, "the learner's state would be another update's"


@dataclass
class Run:
    """A run of the real controller and all that it met."""

    schedule: Schedule
    fleet: Fleet
    learner: TimedLearner
    sync: Releasing
    keeper: Keeper
    witness: Witness = field(default_factory=Witness)

    def make(self) -> "Run":
        ports = Ports(
            prompts(),
            self.fleet,
            Teacher(lambda uid: 0.01),
            self.learner,
            self.sync,
            self.witness,
            None,
            self.keeper,
        )
        self.controller = Controller(self.schedule, ports)
        self.accounting = run_virtual(self.controller.run())
        return self

    def beside(self) -> list[float]:
        """For each weight sync, how long an update ran beside it."""
        return [
            sum(max(0.0, min(b, d) - max(a, c)) for c, d in self.learner.spans)
            for a, b in self.sync.spans
        ]


def run_of(
    schedule: Schedule,
    *,
    rollout_s: Callable[[int], float] = lambda uid: 0.01,
    train_s: Callable[[int], float] = lambda update: 1.0,
    sync_s: Callable[[int], float] = lambda version: 1.0,
    fails: Callable[[int], Exception | None] = lambda uid: None,
    again: Callable[[int], bool] = lambda version: False,
    wanted: set[int] | None = None,
) -> Run:
    fleet, learner = Fleet(rollout_s, fails), TimedLearner(train_s)
    sync = Releasing(fleet, learner, sync_s, again=again)
    return Run(schedule, fleet, learner, sync, Keeper(learner, wanted or set())).make()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    schedule=random_schedules(groups=5, group_sizes=(1,), slots=24),
    drop_rate=st.sampled_from([0.0, 0.1]),
    again_rate=st.sampled_from([0.0, 0.3]),
    wanted=st.sets(st.integers(1, 8)),
)
def test_the_bound_holds_and_nothing_is_lost(
    seed: int, schedule: Schedule, drop_rate: float, again_rate: float, wanted: set[int]
):
    """With random durations, tries and checkpoints."""
    updates, batch_size = schedule.updates, schedule.batch_size
    tau, hold = int(schedule.kind.max_staleness), schedule.kind.hold_batches
    chance = random.Random(seed)
    pace = [chance.lognormvariate(0, 1) ** 2 for _ in range(4000)]
    tries, drops = [chance.random() for _ in range(100)], [chance.random() for _ in range(4000)]
    done = run_of(
        schedule,
        rollout_s=lambda uid: pace[uid],
        train_s=lambda update: pace[update + 2000],
        sync_s=lambda version: pace[version + 3000],
        fails=lambda uid: RolloutRejected("planned") if drops[uid] < drop_rate else None,
        again=lambda version: tries[version] < again_rate,
        wanted=wanted,
    )
    batches, accounting = done.learner.batches, done.accounting
    ages = [staleness_versions(s, batch.version) for batch in batches for s in batch.samples]
    assert 0 <= min(ages) <= max(ages) <= tau
    assert [batch.version for batch in batches] == list(range(updates)), "the learner's versions"
    assert done.sync.synced == list(range(1, updates + 1))
    trained = [s.rollout.prompt.uid for batch in batches for s in batch.samples]
    dropped = [uid for uid, _ in done.witness.drops]
    assert sorted(trained + dropped) == done.witness.admitted_uids
    assert trained == sorted(trained)
    assert (accounting.consumed, accounting.in_flight) == (updates * batch_size, 0)
    assert done.controller._permits.in_use == 0
    assert sorted(done.keeper.kept) == sorted(at for at in wanted if at <= updates)
    for at, state in done.keeper.kept.items():
        assert (state.updates, state.version, state.consumed) == (at, at, at * batch_size)
        assert state.admitted == state.consumed + sum(state.dropped.values()) + len(state.line)
        assert done.beside()[at - 1] == 0, "the state of two updates would be kept"
    if hold >= tau:  # no permit is left for a batch besides, until no more come
        assert not any(done.beside()[: max(0, updates - 1 - tau)])


@pytest.mark.parametrize("tau", [1, 2, 4])
def test_updates_run_beside_weight_syncs(tau: int):
    """All but the first, before which no batch is scored, and the last, which no update follows."""
    done = run_of(planned(8, 4, tau, 64, 64))
    beside = done.beside()
    assert min(beside[:-1]) == pytest.approx(1.0, abs=0.02)
    held = [report.learner_held_s for report in done.witness.reports]
    # an update that is done before the weight sync beside it waits for the rest
    assert held[:-1] == pytest.approx([0.01, *[0.02] * 6], abs=0.02)
    assert held[-1] == pytest.approx(0.02, abs=0.02)


def test_at_most_one_update_runs_beside_a_weight_sync():
    """Weight syncs of ten times an update: the second update waits, and the rest is held."""
    done = run_of(planned(6, 2, 4, 64, 64), sync_s=lambda version: 10.0)
    for begun_s, ended_s in done.sync.spans:
        assert sum(begun_s < start_s < ended_s for start_s, _ in done.learner.spans) <= 1
    held = [report.learner_held_s for report in done.witness.reports]
    assert held[0] == pytest.approx(0.01, abs=0.001)
    assert held[1:-1] == pytest.approx([9.01] * 4, abs=0.03), "10 s, less the update beside it"


def test_a_checkpoint_that_is_due_keeps_the_learner():
    done = run_of(planned(6, 2, 2, 64, 64), wanted={2, 5})
    assert [seconds > 0.5 for seconds in done.beside()] == [True, False, True, True, False, False]
    held = [report.learner_held_s for report in done.witness.reports]
    assert held[1] == pytest.approx(1.01, abs=0.03), "the checkpoint itself is not counted"


def test_another_try_waits_for_the_update_and_lets_none_begin():
    done = run_of(
        planned(6, 2, 2, 64, 64), again=lambda version: version == 3, train_s=lambda update: 4.0
    )
    # 0.01 until the release, then from the end of the update to that of the second try
    assert done.witness.reports[2].learner_held_s == pytest.approx(0.01 + 1.5, abs=0.02)
    assert done.accounting.updates == 6


def test_without_a_release_updates_and_weight_syncs_alternate():
    fleet, learner = Fleet(lambda uid: 0.01), TimedLearner()
    sync = WeightSyncer(fleet, learner)  # asserts that nothing trains, at its start and its end
    witness = Witness()
    ports = Ports(prompts(), fleet, Teacher(), learner, sync, witness)
    run_virtual(Controller(planned(5, 3, 3, 64, 64), ports).run())
    assert [report.learner_held_s for report in witness.reports] == pytest.approx([0.2] * 5)


def test_a_turn_is_taken_back_once_and_returned_once():
    async def scenario() -> None:
        learner = asyncio.Lock()
        turn = Turn(learner)
        await asyncio.sleep(1.0)  # the weight sync before it
        await turn.begin(early=True)
        await asyncio.sleep(2.0)
        turn.release()
        turn.release()
        assert turn.held_s == 3.0
        await turn.ended()
        async with learner:
            taking = asyncio.create_task(turn.take_back())
            await asyncio.sleep(5.0)
            assert not taking.done(), "an update is running"
        await taking
        await turn.take_back()
        await asyncio.sleep(1.0)
        turn.release()
        assert learner.locked(), "a second try keeps it"
        turn.end()
        turn.end()
        assert not learner.locked()
        assert turn.held_s == 4.0

    run_virtual(scenario())
