"""Before every update the engines are asked for room, when none of them has anything to do."""

import asyncio
from dataclasses import dataclass, field

import pytest

from megatron_opd.controller.controller import Controller
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.controller.ports import Ports
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.records.types import LearnerTurn, Prompt, Rollout, Sample
from megatron_opd.sim.clock import run_virtual
from tests.support.fakes import Fleet, Learner, Teacher, WeightSyncer, Witness, prompts
from tests.support.schedules import planned

ROOM_S = 0.5


@dataclass
class Busy(Teacher):
    """Counts what it scores."""

    scoring: int = 0

    async def score(self, rollout: Rollout) -> Sample:
        self.scoring += 1
        try:
            return await super().score(rollout)
        finally:
            self.scoring -= 1


@dataclass
class Sharing(WeightSyncer):
    """Engines that have no memory from `make_room` to the next weight sync."""

    teacher: Busy = field(default_factory=Busy)
    given_up: bool = False
    rooms: list[int] = field(default_factory=list)
    error: Exception | None = None

    async def make_room(self) -> None:
        assert not self.learner.busy
        assert (self.fleet.in_flight, self.teacher.scoring) == (0, 0), "it has work to do"
        self.rooms.append(len(self.learner.batches))
        if self.error is not None:
            raise self.error
        await asyncio.sleep(ROOM_S)
        assert (self.fleet.in_flight, self.teacher.scoring) == (0, 0), "it was given work"
        self.given_up = True

    async def sync(self, version: int, turn: LearnerTurn) -> WeightSyncReport:
        assert self.given_up
        report = await super().sync(version, turn)
        self.given_up = False
        return report


class Sampling(Fleet):
    """Engines that sample only with their memory."""

    sharing: Sharing

    async def generate(self, prompt: Prompt) -> Rollout:
        assert not self.sharing.given_up
        rollout = await super().generate(prompt)
        assert not self.sharing.given_up
        return rollout


def made(updates: int, error: Exception | None = None) -> tuple[Sharing, Witness]:
    fleet, learner, teacher, witness = Sampling(), Learner(), Busy(), Witness()
    sharing = fleet.sharing = Sharing(fleet, learner, teacher=teacher, error=error)
    ports = Ports(prompts(), fleet, teacher, learner, sharing, witness)
    try:
        run_virtual(Controller(planned(updates, 4, 0, type="sync"), ports).run())
    finally:
        assert len(learner.batches) == len(sharing.rooms) - (error is not None)
    return sharing, witness


def test_every_update_has_room_and_nothing_samples_meanwhile():
    sharing, witness = made(3)
    assert sharing.rooms == [0, 1, 2], "once before each update"
    assert sharing.synced == [1, 2, 3]
    assert not sharing.given_up
    assert witness.accounting is not None
    assert witness.accounting.updates == 3


def test_an_update_is_not_begun_without_room():
    with pytest.raises(LoopFailed, match="learn: RuntimeError: no room"):
        made(3, RuntimeError("no room"))
