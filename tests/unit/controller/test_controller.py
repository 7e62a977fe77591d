"""The real controller on fakes and a virtual clock."""

import asyncio
import math

import pytest

from megatron_opd.buffer.permits import staleness_versions
from megatron_opd.buffer.rejection import RolloutRejected, ScoreRejected
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.controller.ports import Ports
from megatron_opd.sim.clock import run_virtual
from tests.support.fakes import Fleet, Learner, Teacher, WeightSyncer, Witness, prompts
from tests.support.schedules import planned


class Pipeline:
    """Fakes wired as the command line wires the real parts."""

    def __init__(
        self,
        *,
        schedule=None,
        source=None,
        fleet=None,
        teacher=None,
        learner=None,
        weight_sync=None,
        guard=None,
    ):
        self.fleet = fleet or Fleet()
        self.teacher = teacher or Teacher()
        self.learner = learner or Learner()
        self.weight_sync = weight_sync or WeightSyncer(self.fleet, self.learner)
        self.weight_sync.fleet, self.weight_sync.learner = self.fleet, self.learner
        self.witness = Witness()
        schedule = schedule or planned(4, 3, 1, 16, 16)
        self.controller = Controller(
            schedule,
            Ports(
                source if source is not None else prompts(),
                self.fleet,
                self.teacher,
                self.learner,
                self.weight_sync,
                self.witness,
                guard,
            ),
        )

    def run(self):
        return run_virtual(self.controller.run())

    def trained_uids(self):
        return [[s.rollout.prompt.uid for s in batch.samples] for batch in self.learner.batches]

    def staleness(self):
        return [
            staleness_versions(s, batch.version)
            for batch in self.learner.batches
            for s in batch.samples
        ]


def failing_on(uid, error):
    return lambda candidate: error if candidate == uid else None


def test_a_run_makes_its_updates_and_drains():
    pipeline = Pipeline()
    accounting = pipeline.run()
    assert (accounting.updates, accounting.version, accounting.consumed) == (4, 4, 12)
    assert (accounting.admitted, accounting.in_flight, accounting.interrupted) == (12, 0, False)
    assert pipeline.weight_sync.synced == [1, 2, 3, 4]
    assert pipeline.trained_uids() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert pipeline.witness.accounting == accounting
    assert pipeline.controller._permits.in_use == 0


def test_tau_zero_is_strictly_synchronous():
    pipeline = Pipeline(schedule=planned(5, 4, 0, 16, 16))
    pipeline.run()
    assert set(pipeline.staleness()) == {0}
    spans = [len(s.rollout.spans) for b in pipeline.learner.batches for s in b.samples]
    assert set(spans) == {1}, "no rollout is in flight during a weight sync"


@pytest.mark.parametrize("slow", ["rollout", "teacher", "learner", "weight_sync"])
def test_any_stage_may_be_the_slow_one(slow):
    pace = dict.fromkeys(["rollout", "teacher", "learner", "weight_sync"], 0.01) | {slow: 10.0}
    pipeline = Pipeline(
        schedule=planned(6, 3, 2, 16, 16),
        fleet=Fleet(lambda _: pace["rollout"]),
        teacher=Teacher(lambda _: pace["teacher"]),
        learner=Learner(lambda _: pace["learner"]),
        weight_sync=WeightSyncer(None, None, lambda _: pace["weight_sync"]),
    )
    accounting = pipeline.run()
    assert accounting.consumed == 18
    assert accounting.in_flight == 0
    assert max(pipeline.staleness()) <= 2


def test_rollouts_run_across_weight_syncs_and_carry_both_versions():
    pipeline = Pipeline(schedule=planned(6, 2, 3, 16, 16), fleet=Fleet(lambda uid: 1 + uid % 5))
    pipeline.run()
    spans = [s.rollout.spans for b in pipeline.learner.batches for s in b.samples]
    assert any(len(span) > 1 for span in spans)


def test_slots_bound_the_requests_in_flight():
    pipeline = Pipeline(schedule=planned(3, 8, 1, 5, 16))
    pipeline.run()
    assert pipeline.fleet.max_in_flight == 5


def test_a_stalled_front_does_not_stall_the_admission_behind_it():
    pipeline = Pipeline(
        schedule=planned(4, 2, 3, 16, 16), fleet=Fleet(lambda uid: 50.0 if uid == 0 else 0.1)
    )
    pipeline.run()
    # the other permits are all used while prompt 0 is in flight
    assert sorted(pipeline.witness.scored_uids[:7]) == [1, 2, 3, 4, 5, 6, 7]
    assert max(pipeline.staleness()) <= 3


def test_drops_are_counted_by_reason_and_replaced():
    def rollout_fails(uid):
        return RolloutRejected("aborted", "student-0") if uid in (0, 7) else None

    def score_fails(uid):
        return ScoreRejected("nan") if uid in (1, 11, 12) else None

    pipeline = Pipeline(fleet=Fleet(fail=rollout_fails), teacher=Teacher(fail=score_fails))
    accounting = pipeline.run()
    assert accounting.dropped == {"aborted": 2, "nan": 3}
    assert accounting.consumed == 12
    assert accounting.admitted == 17
    assert accounting.in_flight == 0
    flat = [uid for batch in pipeline.trained_uids() for uid in batch]
    assert flat == [uid for uid in range(17) if uid not in (0, 1, 7, 11, 12)]
    assert max(pipeline.staleness()) <= 1


def test_the_very_last_sample_may_be_dropped():
    pipeline = Pipeline(teacher=Teacher(fail=failing_on(11, ScoreRejected("nan"))))
    accounting = pipeline.run()
    assert accounting.consumed == 12
    assert accounting.admitted == 13
    assert pipeline.trained_uids()[-1] == [9, 10, 12]


def test_a_run_whose_samples_are_all_dropped_fails_instead_of_spinning():
    pipeline = Pipeline(teacher=Teacher(fail=lambda uid: ScoreRejected("nan", "teacher-0")))
    with pytest.raises(
        LoopFailed, match=r"score-\d+: EverythingDropped: 16 samples in a row .*nan"
    ):
        pipeline.run()
    assert pipeline.witness.accounting.dropped["nan"] >= 16


GROUPED = planned(2, 4, 1, 16, 16, group_size=4)


def test_a_drop_takes_its_group_along_and_nobody_asks_a_teacher_in_vain():
    # 0 and 1 are scored when 2 is dropped; 3 is still with the student
    pipeline = Pipeline(
        schedule=GROUPED,
        fleet=Fleet(
            lambda uid: {2: 4.0, 3: 8.0}.get(uid, 1.0), failing_on(2, RolloutRejected("x"))
        ),
    )
    accounting = pipeline.run()
    assert pipeline.witness.drops == [(2, "x")] + [(i, "group_incomplete") for i in (0, 1, 3)]
    assert accounting.dropped == {"x": 1, "group_incomplete": 3}
    assert (accounting.admitted, accounting.consumed, accounting.in_flight) == (12, 8, 0)
    assert pipeline.trained_uids() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert sorted(pipeline.witness.scored_uids) == [uid for uid in range(12) if uid not in (2, 3)]
    assert 3 in pipeline.witness.rolled_uids, "what the student did is still counted"


def test_members_of_a_broken_group_that_wait_for_a_slot_are_never_sampled():
    pipeline = Pipeline(
        schedule=planned(2, 4, 1, 1, 16, group_size=4),
        fleet=Fleet(fail=failing_on(0, RolloutRejected("x"))),
    )
    assert pipeline.run().dropped == {"x": 1, "group_incomplete": 3}
    assert not {0, 1, 2, 3} & set(pipeline.witness.rolled_uids)
    assert pipeline.trained_uids() == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_members_of_a_broken_group_that_wait_for_a_permit_are_never_admitted():
    # tau = 0: the four permits are with 0..3; 0 breaks its pair at once, 1 soon after
    pipeline = Pipeline(
        schedule=planned(3, 4, 0, 16, 16, group_size=4),
        fleet=Fleet(
            lambda uid: 9.0 if uid in (1, 2, 3) else 1.0, failing_on(4, RolloutRejected("x"))
        ),
        teacher=Teacher(fail=failing_on(0, ScoreRejected("nan"))),
    )
    accounting = pipeline.run()
    # 4 was admitted on the permit of 0, and dropped; 5, 6, 7 waited for permits
    assert [uid for uid in range(8) if uid not in pipeline.witness.admitted_uids] == [5, 6, 7]
    assert accounting.dropped == {"nan": 1, "x": 1, "group_incomplete": 3}
    assert pipeline.trained_uids()[0] == [8, 9, 10, 11]
    assert pipeline.controller._permits.in_use == 0


def test_one_bad_sample_in_a_large_group_is_no_run_of_drops():
    pipeline = Pipeline(
        schedule=planned(2, 32, 0, 64, 64, group_size=32),
        teacher=Teacher(fail=failing_on(5, ScoreRejected("nan"))),
    )
    assert pipeline.run().dropped == {"nan": 1, "group_incomplete": 31}


def test_a_run_that_never_completes_a_group_fails_instead_of_spinning():
    pipeline = Pipeline(
        schedule=GROUPED,
        teacher=Teacher(fail=lambda uid: ScoreRejected("nan") if uid % 4 == 0 else None),
    )
    with pytest.raises(LoopFailed, match=r"EverythingDropped: 16 samples in a row .*nan"):
        pipeline.run()


def test_batches_are_held_back_and_drained_at_the_end():
    pipeline = Pipeline(schedule=planned(5, 2, 2, 16, 16, hold_batches=2))
    accounting = pipeline.run()
    assert (accounting.consumed, accounting.in_flight) == (10, 0)
    assert pipeline.staleness() == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2]


def test_a_finite_source_ends_the_run_and_what_fills_no_batch_is_dropped():
    pipeline = Pipeline(source=prompts(8), schedule=planned(10, 3, 1, 16, 16))
    accounting = pipeline.run()
    assert pipeline.trained_uids() == [[0, 1, 2], [3, 4, 5]]
    assert (accounting.updates, accounting.version, accounting.in_flight) == (2, 2, 0)
    assert (accounting.admitted, accounting.consumed) == (8, 6)
    assert accounting.dropped == {"incomplete_batch": 2}
    assert pipeline.controller.next_uid == 8
    assert pipeline.controller._permits.in_use == 0


def test_a_finite_source_of_whole_batches_drops_nothing():
    pipeline = Pipeline(source=prompts(6), schedule=planned(10, 3, 1, 16, 16))
    accounting = pipeline.run()
    assert (accounting.updates, accounting.version, accounting.dropped) == (2, 2, {})


@pytest.mark.parametrize("kind", [{"hold_batches": 2}, {"order": "completion"}, {"sync_every": 2}])
def test_every_schedule_drains_a_finite_source(kind):
    pipeline = Pipeline(source=prompts(11), schedule=planned(10, 2, 2, 16, 16, **kind))
    accounting = pipeline.run()
    assert (accounting.updates, accounting.version, accounting.in_flight) == (5, 5, 0)
    assert accounting.dropped == {"incomplete_batch": 1}


def test_drops_leave_a_finite_source_fewer_batches():
    broken = RolloutRejected("aborted", "gone")
    pipeline = Pipeline(
        source=prompts(9),
        schedule=planned(10, 3, 1, 16, 16),
        fleet=Fleet(fail=failing_on(4, broken)),
    )
    accounting = pipeline.run()
    assert pipeline.trained_uids() == [[0, 1, 2], [3, 5, 6]]
    assert accounting.dropped == {"aborted": 1, "incomplete_batch": 2}


def test_an_empty_source_makes_no_update():
    accounting = Pipeline(source=prompts(0)).run()
    assert (accounting.updates, accounting.admitted) == (0, 0)


def exploding_prompts():
    yield from prompts(2)
    raise OSError("train.jsonl vanished")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"source": exploding_prompts()}, "admit: OSError: train.jsonl vanished"),
        (
            {"fleet": Fleet(fail=failing_on(4, ConnectionError("student-1 is gone")))},
            r"rollout-\d+: ConnectionError: student-1 is gone",
        ),
        (
            {"teacher": Teacher(fail=failing_on(2, KeyError("x")))},
            r"score-\d+: KeyError: 'x'",
        ),
        (
            {"learner": Learner(fail=failing_on(1, RuntimeError("CUDA\nout of memory")))},
            "^learn: RuntimeError: CUDA$",
        ),
        ({"learner": Learner(loss=lambda u: math.nan)}, "learn: LearnerDiverged: update 0: loss n"),
        (
            {
                "weight_sync": WeightSyncer(
                    None, None, fail=failing_on(2, TimeoutError("begin: 300 s"))
                )
            },
            "sync: TimeoutError: begin: 300 s",
        ),
    ],
    ids=["admit", "rollout", "score", "learn", "diverged", "sync"],
)
def test_a_dying_loop_stops_the_run_with_its_cause(broken, message):
    pipeline = Pipeline(**broken)
    with pytest.raises(LoopFailed, match=message):
        pipeline.run()
    accounting = pipeline.witness.accounting
    left = accounting.admitted - accounting.consumed - sum(accounting.dropped.values())
    assert accounting.in_flight == left >= 0
    assert pipeline.fleet.in_flight == 0, "every loop has ended"


def test_weights_that_diverged_are_not_sent():
    pipeline = Pipeline(learner=Learner(loss=lambda update: math.inf if update == 2 else 1.0))
    with pytest.raises(LoopFailed, match="update 2: loss inf"):
        pipeline.run()
    assert pipeline.weight_sync.synced == [1, 2]


def test_permits_stay_held_after_a_failed_weight_sync():
    pipeline = Pipeline(
        weight_sync=WeightSyncer(None, None, fail=failing_on(1, RuntimeError("boom"))),
    )
    with pytest.raises(LoopFailed, match="sync"):
        pipeline.run()
    accounting = pipeline.witness.accounting
    assert accounting.version == 0
    assert accounting.consumed == 3
    assert pipeline.controller._permits.in_use == 6


def test_cancellation_ends_every_loop_and_accounts_for_everything():
    pipeline = Pipeline(schedule=planned(100, 3, 1, 16, 16))

    async def scenario():
        run = asyncio.create_task(pipeline.controller.run())
        await asyncio.sleep(7.77)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())
    accounting = pipeline.controller.accounting
    assert accounting.interrupted
    assert pipeline.witness.accounting == accounting
    assert accounting.consumed > 0
    assert accounting.admitted == accounting.consumed + accounting.in_flight
    assert accounting.in_flight <= 6
    assert pipeline.fleet.in_flight == 0


def test_errors_of_torn_connections_do_not_turn_an_interruption_into_a_failure():
    class TornFleet(Fleet):
        async def generate(self, prompt):
            try:
                return await super().generate(prompt)
            except asyncio.CancelledError:
                raise ConnectionError("closed under me") from None

    pipeline = Pipeline(fleet=TornFleet(), schedule=planned(100, 3, 1, 16, 16))

    async def scenario():
        run = asyncio.create_task(pipeline.controller.run())
        await asyncio.sleep(5.5)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    run_virtual(scenario())
    assert pipeline.controller.accounting.interrupted


class DyingServer:
    """A guard whose process dies at a given time."""

    def __init__(self, at_s):
        self.at_s = at_s

    async def watch(self):
        await asyncio.sleep(self.at_s)
        raise RuntimeError("student-0 exited with code -9, see logs/student-0.log")

    async def diagnose(self, error):
        await asyncio.sleep(0.1)
        return RuntimeError("student-0 exited with code -9, see logs/student-0.log")


def test_the_guard_stops_the_run():
    pipeline = Pipeline(guard=DyingServer(3.0), schedule=planned(100, 3, 1, 16, 16))
    with pytest.raises(LoopFailed, match="health: RuntimeError: student-0 exited with code -9"):
        pipeline.run()


def test_the_guard_names_the_process_behind_a_connection_error():
    pipeline = Pipeline(
        guard=DyingServer(1e9), fleet=Fleet(fail=failing_on(4, ConnectionError("reset by peer")))
    )
    with pytest.raises(LoopFailed, match="health: RuntimeError: student-0 exited"):
        pipeline.run()


def test_a_guard_does_not_keep_a_finished_run_alive():
    assert Pipeline(guard=DyingServer(1e9)).run().updates == 4


def test_it_ends_on_a_real_clock():
    """2,000 samples on a real loop, where nothing ever waits for a timer."""

    def instant(_):
        return 0.0

    pipeline = Pipeline(
        schedule=planned(20, 100, 1, 64, 64),
        fleet=Fleet(instant),
        teacher=Teacher(instant),
        learner=Learner(instant),
        weight_sync=WeightSyncer(None, None, instant),
    )
    accounting = asyncio.run(pipeline.controller.run())
    assert accounting.consumed == 2000
