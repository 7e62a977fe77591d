"""The real controller drops groups for their rewards, and takes prompts from a curriculum."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from megatron_opd.buffer.spread import GroupRule
from megatron_opd.config.curriculum import PassRateCurriculum
from megatron_opd.config.selection import RewardSpread
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.schedule import Schedule
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.controller.snapshot_codec import decode_state, encode_state
from megatron_opd.data.curriculum import CurriculumSource
from megatron_opd.data.stream import MixedSource, PromptSource
from megatron_opd.records.types import Prompt, Rollout, Sample
from megatron_opd.sim.clock import run_virtual
from tests.support.fakes import Fleet, Learner, Teacher, WeightSyncer, Witness, make_prompt
from tests.support.schedules import planned

RIGHT, WRONG, MIXED = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)


@dataclass
class Verifier(Teacher):
    """Rewards by uid, or by the row of the prompt."""

    reward: Callable[[Prompt], float] = lambda prompt: 0.0

    async def score(self, rollout: Rollout) -> Sample:
        return replace(await super().score(rollout), reward=self.reward(rollout.prompt))


class Keeper:
    """Every update's state, as bytes."""

    def __init__(self) -> None:
        self.kept: dict[int, bytes] = {}

    def due(self, updates: int) -> bool:
        return True

    async def after_update(self, updates: int, state: Callable[[], ControllerState]) -> None:
        self.kept[updates] = encode_state(await state())


@dataclass
class Done:
    """A run that has ended."""

    batches: list[list[Sample]]
    witness: Any
    kept: dict[int, bytes]
    controller: Controller

    @property
    def uids(self) -> list[list[int]]:
        return [[sample.rollout.prompt.uid for sample in batch] for batch in self.batches]

    @property
    def rows(self) -> list[list[int]]:
        return [[sample.rollout.prompt.row for sample in batch] for batch in self.batches]


def run(
    schedule: Schedule,
    reward: Callable[[Prompt], float],
    source: CurriculumSource | None = None,
    state: ControllerState = NOTHING_YET,
    pace: Callable[[int], float] = lambda uid: 1.0,
) -> Done:
    fleet, learner, keeper, witness = Fleet(pace), Learner(), Keeper(), Witness()
    fleet.version = state.version
    ports = Ports(
        map(make_prompt, count(state.next_uid)) if source is None else source,
        fleet,
        Verifier(reward=reward),
        learner,
        WeightSyncer(fleet, learner),
        witness,
        curriculum=source,
        keeper=keeper,
    )
    controller = Controller(schedule, ports, state)
    run_virtual(controller.run())
    batches = [list(batch.samples) for batch in learner.batches]
    return Done(batches, witness, keeper.kept, controller)


def by_group(*groups: tuple[float, ...]) -> Callable[[Prompt], float]:
    """Rewards of the first groups; those after them differ."""
    return lambda prompt: (groups[prompt.uid // 2] if prompt.uid // 2 < len(groups) else MIXED)[
        prompt.uid % 2
    ]


def filtering(schedule: Schedule, **limits: Any) -> Schedule:
    return replace(schedule, groups=GroupRule(RewardSpread.model_validate(limits)))


def test_groups_without_spread_are_replaced_by_later_prompts_and_counted():
    done = run(filtering(planned(2, 4, 0, group_size=2)), by_group(MIXED, RIGHT, WRONG, (0.5, 0.5)))
    assert done.uids == [[0, 1, 8, 9], [10, 11, 12, 13]]
    accounting = done.controller.accounting
    assert accounting.dropped == {"all_right": 2, "all_wrong": 2, "no_reward_spread": 2}
    assert (accounting.admitted, accounting.consumed, accounting.in_flight) == (14, 8, 0)
    assert done.controller._permits.in_use == 0


def test_without_a_rule_they_are_trained_on():
    done = run(planned(2, 4, 0, group_size=2), by_group(RIGHT, WRONG))
    assert done.uids == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_run_without_anything_to_learn_ends_and_says_why():
    with pytest.raises(LoopFailed, match=r"NothingToLearn: 3 groups in a row were dropped"):
        run(filtering(planned(2, 4, 0, group_size=2), most_in_a_row=3), lambda prompt: 1.0)


def test_or_goes_on_with_one_of_so_many():
    done = run(
        filtering(planned(2, 4, 0, group_size=2), most_in_a_row=2, exhausted="keep"),
        lambda prompt: 1.0,
    )
    assert done.uids == [[4, 5, 10, 11], [16, 17, 22, 23]]
    assert done.controller.accounting.dropped == {"all_right": 16}


@pytest.mark.parametrize("kind", [{"max_staleness": 0}, {"max_staleness": 1, "hold_batches": 1}])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_run_that_repeats_itself_drops_the_same_groups_resumed_or_not(
    kind: dict[str, Any], at: int
):
    """In the schedules that run.deterministic allows, whatever the order of arrival."""
    schedule = filtering(planned(6, 4, group_size=2, **kind), most_in_a_row=2, exhausted="keep")

    def reward(prompt: Prompt) -> float:
        lot = np.random.default_rng(prompt.uid // 2).random()
        return float(prompt.uid % 2) if lot < 0.3 else float(lot < 0.6)

    def pace(seed: int) -> Callable[[int], float]:
        return lambda uid: float(np.random.default_rng((seed, uid)).exponential()) + 0.01

    whole = run(schedule, reward, pace=pace(1))
    again = run(schedule, reward, pace=pace(2))
    assert whole.uids == again.uids
    assert whole.controller.accounting == again.controller.accounting
    state = decode_state(whole.kept[at])
    rest = run(schedule, reward, state=state, pace=pace(3))
    assert whole.uids[:at] + rest.uids == whole.uids
    assert rest.controller.accounting == whole.controller.accounting
    assert (
        asyncio.run(rest.controller.snapshot()).spread
        == asyncio.run(whole.controller.snapshot()).spread
    )


def make_source(problems: int, **keys: Any) -> CurriculumSource:
    prompts = [Prompt(i, str(i), np.arange(3, dtype=np.int32)) for i in range(problems)]
    config = PassRateCurriculum.model_validate(keys)
    stream = PromptSource([MixedSource("rows", tuple(prompts))], seed=1, shuffle=False)
    return CurriculumSource(stream, problems, config, seed=1, group_size=2)


def test_a_curriculum_passes_over_what_is_always_right_or_wrong():
    rates = (MIXED, RIGHT, MIXED, WRONG)
    reward = lambda prompt: rates[prompt.row][prompt.uid % 2]  # noqa: E731
    done = run(planned(4, 4, 0, group_size=2), reward, make_source(4, outside=0.0))
    # the first version has seen problems 0 and 1, the second all of them
    assert done.rows == [[0, 0, 1, 1], [2, 2, 3, 3], [0, 0, 2, 2], [0, 0, 2, 2]]


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_curriculum_repeats_itself_resumed_or_not(at: int):
    schedule = filtering(planned(7, 4, 1, group_size=2, hold_batches=1))

    def reward(prompt: Prompt) -> float:
        chances = np.random.default_rng(prompt.row).random()
        return float(np.random.default_rng((7, prompt.uid)).random() < chances)

    def pace(seed: int) -> Callable[[int], float]:
        return lambda uid: float(np.random.default_rng((seed, uid)).exponential()) + 0.01

    def source() -> CurriculumSource:
        return make_source(9, outside=0.3, memory=3, low=0.2, high=0.8)

    whole = run(schedule, reward, source(), pace=pace(1))
    again = run(schedule, reward, source(), pace=pace(2))
    assert again.rows == whole.rows
    state = decode_state(whole.kept[at])
    rest = run(schedule, reward, source().at(state.next_uid, state.curriculum), state, pace(3))
    assert whole.rows[:at] + rest.rows == whole.rows
    assert len({tuple(batch) for batch in whole.rows}) > 1
