"""The real controller loses what data workers hold, at any time and in any stage."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import pytest

from megatron_opd.buffer.permits import staleness_versions
from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.buffer.spread import GroupRule
from megatron_opd.config.selection import RewardSpread
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports, TakeState
from megatron_opd.controller.schedule import Schedule
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.controller.snapshot_codec import decode_state, encode_state
from megatron_opd.sim.clock import run_virtual
from tests.support.fakes import WeightSyncer, Witness, make_prompt
from tests.support.lossy_store import HeldFleet, HeldTeacher, LossyStore, TakingLearner
from tests.support.schedules import planned

STAGES = {"waiting for its scores", "being scored", "scored", "in a batch", "trained on"}
REASONS = {
    *("empty_response", "nan", "group_incomplete", "all_right", "all_wrong", "no_reward_spread"),
    "incomplete_batch",
}


@dataclass
class Keeper:
    """Keeps every second state, as bytes; samples are lost before and while it is taken."""

    store: LossyStore
    kept: dict[int, bytes]

    def due(self, updates: int) -> bool:
        return updates % 2 == 0

    async def after_update(self, updates: int, state: TakeState) -> None:
        self.store.lose(0.2)
        taking = asyncio.ensure_future(state())
        await asyncio.sleep(self.store.transfer_s() / 2)
        self.store.lose(0.2)
        self.kept[updates] = encode_state(await taking)

    async def at_end(self, updates: int, state: TakeState) -> None:
        self.kept[updates] = encode_state(await state())


@dataclass
class Done:
    """A run that has ended."""

    controller: Controller
    learner: TakingLearner
    store: LossyStore
    witness: Witness
    kept: dict[int, bytes]

    @property
    def trained(self) -> list[int]:
        return [s.rollout.prompt.uid for batch in self.learner.batches for s in batch.samples]


def run(schedule: Schedule, seed: int, state: ControllerState = NOTHING_YET) -> Done:
    rng = np.random.default_rng(seed)

    def pace(mean_s: float) -> float:
        return float(rng.exponential(mean_s)) + 0.01

    def reward(uid: int) -> float | None:
        if schedule.groups is None:
            return None
        alike = np.random.default_rng((seed, uid // schedule.group_size)).random() < 0.4
        return 1.0 if alike else float(rng.random() < 0.5)

    store = LossyStore(rng, lambda: pace(0.2), lambda: pace(0.2))
    fleet = HeldFleet(lambda _: pace(1.0), version=state.version, store=store)
    learner, witness = TakingLearner(lambda _: pace(0.5), store=store), Witness()
    keeper = Keeper(store, {})
    teacher = HeldTeacher(store, lambda: pace(0.5), reward)
    source = map(make_prompt, count(state.next_uid))
    syncer = WeightSyncer(fleet, learner)
    ports = Ports(source, fleet, teacher, learner, syncer, witness, keeper=keeper, store=store)

    async def scenario() -> Controller:
        controller = Controller(schedule, ports, state)
        running = asyncio.ensure_future(controller.run())
        for _ in range(12):
            await asyncio.wait({running}, timeout=pace(1.5))
            store.lose(rng.choice([0.1, 0.5, 1.0]))
        await running
        return controller

    return Done(run_virtual(scenario()), learner, store, witness, keeper.kept)


def schedules() -> list[Schedule]:
    found = []
    for kind in (
        {"order": "admission"},
        {"order": "completion"},
        {"order": "completion", "sync_every": 2},
        {"hold_batches": 1},
        {"in_flight": "abort"},
    ):
        for group_size in (1, 2, 4):
            made = planned(6, 4, 1, 12, 3, group_size=group_size, **kind)
            found.append(made)
            if group_size > 1:
                spread = RewardSpread(most_in_a_row=2, exhausted="keep")
                found.append(replace(made, groups=GroupRule(spread)))
    return found


def check(schedule: Schedule, done: Done, before: ControllerState = NOTHING_YET) -> None:
    accounting = done.controller.accounting
    assert accounting.in_flight == 0
    dropped = [uid for uid, _ in done.witness.drops]
    assert {reason for _, reason in done.witness.drops} <= REASONS
    line = [member.uid for member in before.line]
    ended = Counter([*done.trained, *dropped])
    assert ended == Counter([*line, *done.witness.admitted_uids]), "each ends once"
    assert done.store.released == ended
    assert not done.store.held
    assert done.controller._permits.in_use == 0
    for batch in done.learner.batches:
        for group in {s.rollout.prompt.uid // schedule.group_size for s in batch.samples}:
            uids = {s.rollout.prompt.uid for s in batch.samples}
            assert uids >= set(
                range(group * schedule.group_size, (group + 1) * schedule.group_size)
            )
        for sample in batch.samples:
            assert staleness_versions(sample, batch.version) <= schedule.bound
    assert accounting.updates == schedule.updates
    assert accounting.consumed == schedule.updates * schedule.batch_size


def name(schedule: Schedule) -> str:
    kind = schedule.kind
    words = [kind.order, kind.in_flight, f"n{kind.sync_every}", f"h{kind.held}"]
    return "-".join([*words, f"G{schedule.group_size}", "spread" if schedule.groups else "all"])


@pytest.mark.parametrize("schedule", schedules(), ids=name)
def test_every_prompt_is_consumed_once_or_dropped(schedule: Schedule):
    lost_in: Counter[str] = Counter()
    for seed in range(8):
        done = run(schedule, seed)
        check(schedule, done)
        lost_in += done.store.lost_in
        for at, content in done.kept.items():
            state = decode_state(content)
            assert (state.updates, state.version) == (at, at)
        state = decode_state(done.kept[2])
        check(schedule, run(schedule, seed + 1000, state), state)
    assert set(lost_in) == STAGES


def test_a_waiting_group_whose_lost_member_cannot_be_sampled_anew_is_dropped():
    """Groups 0 and 1 are alike, 1 waits for 0; a member of 1 is lost, and rejected then."""
    rng = np.random.default_rng(0)
    store = LossyStore(rng, lambda: 0.1, lambda: 0.1, rejected=0.0, loses_more=False)
    tries: Counter[int] = Counter()

    def refuse(uid: int) -> Exception | None:
        tries[uid] += 1
        return RolloutRejected("empty_response") if (uid, tries[uid]) == (2, 2) else None

    fleet = HeldFleet(lambda uid: 50.0 if uid == 0 else 1.0 + uid / 10, refuse, store=store)
    learner, witness = TakingLearner(store=store), Witness()
    teacher = HeldTeacher(store, lambda: 0.5, lambda uid: 1.0 if uid < 4 else uid % 2)
    rule = GroupRule(RewardSpread(most_in_a_row=1))
    schedule = replace(planned(3, 4, 1, group_size=2), groups=rule)
    syncer = WeightSyncer(fleet, learner)
    ports = Ports(map(make_prompt, count()), fleet, teacher, learner, syncer, witness, store=store)

    async def scenario() -> Controller:
        controller = Controller(schedule, ports)
        running = asyncio.ensure_future(controller.run())
        await asyncio.sleep(10)
        store.lose_these([2])
        await asyncio.sleep(10)
        assert witness.drops == [(2, "empty_response"), (3, "group_incomplete")]
        assert witness.depths[-1].scoring == 0
        await running
        return controller

    check(schedule, Done(run_virtual(scenario()), learner, store, witness, {}))


def test_a_snapshot_ends_though_what_was_lost_is_there_again_by_then():
    """Arrays of others take longer than sampling anew takes, and nothing happens afterwards."""
    rng = np.random.default_rng(0)
    store = LossyStore(rng, lambda: 30.0, lambda: 0.1, rejected=0.0, loses_more=False)
    fleet = HeldFleet(store=store)
    learner, witness, kept = TakingLearner(store=store), Witness(), {}

    class Losing(Keeper):
        async def after_update(self, updates: int, state: TakeState) -> None:
            await asyncio.sleep(100)  # all permits are used, and all is scored
            if updates == 2:
                store.lose_these([max(store.held)])
            kept[updates] = encode_state(await state())

    teacher = HeldTeacher(store, lambda: 0.5, lambda uid: None)
    ports = Ports(
        map(make_prompt, count()),
        fleet,
        teacher,
        learner,
        WeightSyncer(fleet, learner),
        witness,
        keeper=Losing(store, kept),
        store=store,
    )
    schedule = planned(4, 3, 1)
    controller = Controller(schedule, ports)
    run_virtual(controller.run())
    assert {at: len(decode_state(content).line) for at, content in kept.items()} == {2: 6, 4: 0}
    check(schedule, Done(controller, learner, store, witness, kept))
