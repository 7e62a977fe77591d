"""Runs a plan on the real controller and checks what must hold of every schedule."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from checks.schedule_properties.controls import broken
from checks.schedule_properties.plans import Plan
from checks.schedule_properties.world import (
    TOKENS,
    Learner,
    Servers,
    Syncer,
    Teacher,
    make_prompt,
)
from megatron_opd.buffer.spread import GroupRule
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.schedule import Schedule
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.metrics.types import Accounting, Depths, WeightSyncReport
from megatron_opd.records.drops import GROUP_REASONS, INCOMPLETE_BATCH
from megatron_opd.records.types import Batch, Prompt, Rollout, Sample
from megatron_opd.sim.clock import run_virtual

Control = Literal[
    "early_permits",
    "no_deadlines",
    "kept_permits",
    "permits_of_turns",
    "tight_bound",
    "verdicts_as_scored",
]
LIMIT_S = 1e4
"""Virtual seconds after which a run that makes no progress has failed."""


@dataclass
class Witness:
    """Keeps what a run says, and checks whenever anything moves that no permit is lost or made."""

    schedule: Schedule
    batches: list[Batch] = field(default_factory=list)
    scores: list[Sample] = field(default_factory=list[Sample])
    reasons: dict[int, str] = field(default_factory=dict[int, str])
    """{uid of a dropped sample: what for}."""
    most_permits: int = 0
    _unsynced: int = 0
    accounting: Accounting | None = None

    def started(self, now_s: float, depths: Depths) -> None:
        """See Observer."""
        self.moved(depths)

    def admitted(self, prompt: Prompt) -> None:
        """See Observer."""

    def rolled_out(self, rollout: Rollout) -> None:
        """See Observer."""

    def scored(self, sample: Sample, started_s: float, finished_s: float) -> None:
        """See Observer."""
        self.scores.append(sample)

    def dropped(self, uid: int, reason: str, detail: str) -> None:
        """See Observer."""
        assert uid not in self.reasons, "a prompt is dropped twice"
        self.reasons[uid] = reason

    def trained(self, batch: Batch, figures: Any, started_s: float, finished_s: float) -> None:
        """See Observer."""
        self.batches.append(batch)
        self._unsynced += len(batch.samples)

    def updated(self, batch: Batch, depths: Depths) -> None:
        """See Observer."""
        self.moved(depths)

    def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
        """See Observer."""
        self._unsynced = sum(len(b.samples) for b in self.batches if b.update >= report.version)
        self.moved(depths)

    def moved(self, depths: Depths) -> None:
        """Permits are held by who is in line, in the batch being trained, or not live yet."""
        assert min(depths.rolling, depths.scoring, depths.buffered) >= 0
        self.most_permits = max(self.most_permits, depths.permits_in_use)
        assert depths.permits_in_use <= depths.permits, "more permits than there are"
        line = depths.rolling + depths.scoring + depths.buffered
        training = depths.permits_in_use - line - self._unsynced
        size = self.schedule.batch_size
        assert 0 <= training <= size, f"permits are not conserved: {training} of {size} in training"

    def ended(self, accounting: Accounting, now_s: float) -> None:
        """See Observer."""
        assert self.accounting is None
        self.accounting = accounting


@dataclass
class Leg:
    """One controller's part of a run: from `began`, and how it ended."""

    schedule: Schedule
    witness: Witness
    sync: Syncer
    servers: Servers
    began: ControllerState
    state: ControllerState
    accounting: Accounting
    permits_in_use: int
    failed: bool
    told_to_end: bool
    seconds: float

    @property
    def rollouts(self) -> list[Rollout]:
        """Returns those that were trained on."""
        return [sample.rollout for batch in self.witness.batches for sample in batch.samples]

    @property
    def staleness(self) -> list[int]:
        """Returns that of every sample's oldest token."""
        return [
            batch.version - min(span.version for span in rollout.spans)
            for batch in self.witness.batches
            for rollout in _of(batch)
        ]


def run_of(plan: Plan, control: Control | None = None) -> list[Leg]:
    """Run it; two legs where it was ended early and went on."""
    legs = [_leg(plan, NOTHING_YET, plan.end_s, control)]
    if legs[0].told_to_end and plan.resumes and not legs[0].failed:
        legs.append(_leg(plan, legs[0].state, None, control))
    return legs


def _leg(plan: Plan, state: ControllerState, end_s: float | None, control: Control | None) -> Leg:
    async def run() -> Leg:
        servers = Servers(plan, state.version)
        learner, witness = Learner(plan), Witness(plan.schedule)
        sync = Syncer(plan, servers, learner)
        uids = itertools.count(state.next_uid)
        if plan.prompts is not None:
            uids = range(state.next_uid, plan.prompts)
        ports = Ports(
            map(make_prompt, uids),
            servers,
            Teacher(plan),
            learner,
            sync,
            witness,
            hold=servers.turns,
        )
        controller = Controller(plan.schedule, ports, state)
        broken(controller, control)
        faults = asyncio.create_task(servers.faults())
        loop = asyncio.get_running_loop()
        if end_s is not None:
            loop.call_later(end_s, controller.end_early)
        failed = False
        try:
            async with asyncio.timeout(LIMIT_S):
                await controller.run()
        except LoopFailed as error:
            if "SyncFailed" not in str(error):
                raise
            failed = True
        finally:
            faults.cancel()
        return Leg(
            plan.schedule,
            witness,
            sync,
            servers,
            state,
            await controller.snapshot(),
            controller.accounting,
            controller._permits.in_use,
            failed,
            controller._batcher.stopped,
            loop.time(),
        )

    return run_virtual(run())


def check(legs: list[Leg], control: Control | None = None) -> None:
    """Everything that holds of a schedule whatever happens."""
    schedule = legs[0].schedule
    uids: list[int] = []
    for leg in legs:
        _check_leg(leg, schedule.bound - (control == "tight_bound"))
        uids += [rollout.prompt.uid for rollout in leg.rollouts]
        uids += leg.witness.reasons
    assert len(uids) == len(set(uids)), "a prompt is consumed or dropped twice"
    last = legs[-1]
    assert len(uids) == last.accounting.consumed + sum(last.accounting.dropped.values())
    waits = {member.uid for member in last.state.line} if not last.failed else None
    if waits is not None:
        assert waits.isdisjoint(uids)
        assert len(waits) == last.accounting.in_flight
        if not last.told_to_end:
            assert waits == set(), "a run that ends by itself leaves something"
    if schedule.groups is not None:
        _check_verdicts(legs, schedule.groups)


def _check_verdicts(legs: list[Leg], rule: GroupRule) -> None:
    """Which groups were dropped for their rewards, in the order of admission, by the rule alone."""
    size, most = legs[0].schedule.group_size, rule.spread.most_in_a_row
    rewards = {s.rollout.prompt.uid: s.reward for leg in legs for s in leg.witness.scores}
    consumed = {r.prompt.uid for leg in legs for r in leg.rollouts}
    reasons = {uid: reason for leg in legs for uid, reason in leg.witness.reasons.items()}
    in_a_row = 0
    for first in range(0, legs[-1].state.next_uid, size):
        members = range(first, first + size)
        why = {reasons[uid] for uid in members if uid in reasons}
        why.discard(INCOMPLETE_BATCH)  # it was kept
        if why - set(GROUP_REASONS):
            continue  # it lost a member
        left_out = reasons.get(first) == INCOMPLETE_BATCH
        if not (why or left_out or first in consumed):
            return  # still on its way where the run ended
        alike = len({rewards[uid] for uid in members}) == 1
        dropped = alike and in_a_row < most
        assert dropped == bool(why), "a group without spread is kept, or one with spread dropped"
        in_a_row = in_a_row + 1 if dropped else 0


def _check_leg(leg: Leg, bound: int) -> None:
    schedule, accounting, batches = leg.schedule, leg.accounting, leg.witness.batches
    size, kind = schedule.batch_size, schedule.kind
    done = leg.began.updates
    assert accounting == leg.witness.accounting
    assert accounting.updates == done + len(batches) <= schedule.updates
    assert accounting.admitted == (
        accounting.consumed + sum(accounting.dropped.values()) + accounting.in_flight
    )
    assert [batch.update for batch in batches] == list(range(done, accounting.updates))
    assert all(batch.version == batch.update for batch in batches)
    assert max(leg.staleness, default=0) <= bound, "the bound on staleness is broken"
    for rollout in leg.rollouts:
        versions = [span.version for span in rollout.spans]
        assert versions == sorted(versions), "a later token is of older weights"
    newest = [(max(s.version for s in r.spans), b.version) for b in batches for r in _of(b)]
    assert all(token <= learner for token, learner in newest), "a token of weights to come"
    ends_here = None if leg.failed else accounting.updates
    synced = [
        u
        for u in range(done + 1, accounting.updates + 1)
        if u % kind.sync_every == 0 or u in (schedule.updates, ends_here)
    ]
    if leg.failed:
        assert leg.sync.synced == synced[: len(leg.sync.synced)]
    else:
        assert leg.sync.synced == synced, "weight syncs are missing or out of order"
        assert leg.permits_in_use == accounting.in_flight
    assert all(len(batch.samples) == size for batch in batches)
    for batch in batches:
        groups = Counter(r.prompt.uid // schedule.group_size for r in _of(batch))
        assert set(groups.values()) == {schedule.group_size}, "a group is torn apart"
    uids = [rollout.prompt.uid for rollout in leg.rollouts]
    if kind.order == "admission" and schedule.plan is None:
        assert uids == sorted(uids), "not in the order of admission"
    if kind.in_flight != "in_place":
        assert all(sampling == 0 for _, sampling in leg.sync.at), "sampled during a weight sync"
        assert not any(map(splits_a_turn, leg.rollouts)), "a turn of two versions"


def splits_a_turn(rollout: Rollout) -> bool:
    """Return whether a weight sync came within a turn."""
    return any(span.start % TOKENS for span in rollout.spans)


def goes_on_after_a_sync(rollout: Rollout) -> bool:
    """Return whether a weight sync came between two turns."""
    return any(span.start and span.start % TOKENS == 0 for span in rollout.spans)


def _of(batch: Batch) -> list[Rollout]:
    return [sample.rollout for sample in batch.samples]
