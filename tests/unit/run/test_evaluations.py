"""Evaluations of a whole fake run: the controller that ships, on a virtual clock."""

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.evaluation.evaluations import Evaluations
from megatron_opd.evaluation.progress import EvaluationProgress, progress_from, rows_of
from megatron_opd.metrics.observers import Observers
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Depths, WeightSyncReport
from megatron_opd.records.types import Batch
from megatron_opd.run.evaluations import EvaluatedVersions, EvaluatingKeeper
from megatron_opd.sim.clock import run_virtual
from tests.support.evaluating import World
from tests.support.fakes import Fleet, Learner, Teacher, WeightSyncer, make_prompt
from tests.support.schedules import planned

BATCH = 3


class Kept:
    """Keeps the controller's state, and with it what is known of evaluations, in memory."""

    def __init__(self, every: int, evaluations: Evaluations) -> None:
        self._every, self._evaluations = every, evaluations
        self.states: dict[int, tuple[ControllerState, dict[str, Any]]] = {}

    def due(self, updates: int) -> bool:
        return self._every > 0 and updates % self._every == 0

    async def after_update(self, updates: int, state: Callable[[], ControllerState]) -> None:
        progress = json.loads(json.dumps(self._evaluations.progress().as_json()))
        self.states[updates] = await state(), progress

    async def at_end(self, updates: int, state: Callable[[], ControllerState]) -> None:
        await self.after_update(updates, state)


async def train(
    world: World,
    found: Evaluations,
    updates: int = 40,
    state: ControllerState = NOTHING_YET,
    *,
    every: int = 0,
    until_s: float | None = None,
) -> Kept:
    """Run the controller. every: updates between checkpoints. until_s: be cancelled then."""
    fleet, learner, kept = Fleet(version=state.version), Learner(), Kept(every, found)
    world.updates = state.updates

    class Live(EvaluatedVersions):
        def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
            world.updates = report.version
            super().weights_synced(batch, report, depths)

    clock = asyncio.get_running_loop().time
    recorder = Observers([RunRecorder(RunTotals(), clock=clock), Live(found)])
    ports = Ports(
        map(make_prompt, itertools.count(state.next_uid)),
        fleet,
        Teacher(),
        learner,
        WeightSyncer(fleet, learner),
        recorder,
        keeper=EvaluatingKeeper(kept, found),
    )
    controller = Controller(planned(updates, BATCH, 1), ports, state)
    world.stop = controller.end_early
    await found.again()
    run = asyncio.create_task(controller.run())
    if until_s is None:
        await run
        world.trained_s = clock()
        await found.after(controller.accounting.updates)
    else:
        await asyncio.sleep(until_s)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await found.abandon()
    return kept


def seen(world: World) -> list[tuple[int, str]]:
    return [(row["update"], row["set"]) for row in world.rows]


def test_a_run_that_blocks_evaluates_each_version_by_itself() -> None:
    async def scenario() -> None:
        world = World(answer_s=7.0)
        await train(world, world.evaluations(last_update=40, blocks=True))
        assert seen(world) == [(n, "easy") for n in (10, 20, 30, 40)]
        for row in world.rows:
            assert row["version_min"] == row["version_max"] == row["update"]
            assert row["lag_steps"] == 0

    run_virtual(scenario())


def test_training_takes_as_long_as_without_evaluations_in_the_background() -> None:
    async def trained_s(every: int) -> float:
        world = World(answer_s=7.0)
        found = world.evaluations(last_update=100, every=every, after=False)
        await train(world, found, 30, until_s=None)
        return world.trained_s

    assert run_virtual(trained_s(0)) == run_virtual(trained_s(3))


def test_prompts_and_batches_are_counted_alike_with_evaluations() -> None:
    batches: list[list[Any]] = []

    async def scenario(**settings: Any) -> None:
        world = World(answer_s=3.3)
        found = world.evaluations(last_update=20, **settings)
        kept = await train(world, found, 20, every=20)
        state, _ = kept.states[20]
        batches.append([state.consumed, state.next_uid, state.line, state.dropped])

    for settings in ({"every": 0}, {"every": 1}, {"every": 5, "blocks": True}):
        run_virtual(scenario(**settings))
    assert batches[0] == batches[1]
    assert batches[0][:2] == batches[2][:2]


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("until_s", [12.0, 14.0, 17.0, 22.0, 29.0])
def test_an_interrupted_run_has_every_row_once(blocks: bool, until_s: float) -> None:
    settings = {"blocks": blocks, "last_update": 30, "every": 4}

    async def first() -> Kept:
        world = World(answer_s=2.0)
        return await train(world, world.evaluations(**settings), 30, every=6, until_s=until_s)

    kept = run_virtual(first())
    assert kept.states
    state, progress = kept.states[max(kept.states)]

    async def second() -> None:
        world = World(answer_s=2.0)
        found = world.evaluations(**settings)
        found.restore(progress_from(progress))
        await train(world, found, 30, state)
        rows = [json.loads(line) for line in rows_of(found.progress()).splitlines()]
        places = [row["update"] for row in rows]
        assert places == sorted(set(places)), "none twice"
        assert len(places) + found.skipped == 8, "4, 8, ..., 28 and the last one, none left out"
        assert places[-1] == 30
        if blocks:
            assert all(row["version_min"] == row["version_max"] == row["update"] for row in rows)

    run_virtual(second())


def test_a_run_that_stops_early_keeps_its_state_and_ends_by_itself() -> None:
    async def scenario() -> None:
        world = World()
        found = world.evaluations(last_update=100, every=5, patience=2, blocks=True)
        kept = await train(world, found, 100)
        assert found.stopped_at == 15
        assert max(kept.states) == 15
        assert seen(world) == [(5, "easy"), (10, "easy"), (15, "easy")]

    run_virtual(scenario())


def test_the_keeper_evaluates_before_it_keeps() -> None:
    async def scenario() -> None:
        world = World(answer_s=5.0)
        found = world.evaluations(last_update=40, every=5, blocks=True)
        kept = await train(world, found, 12, every=5)
        for updates, (_, progress) in kept.states.items():
            assert [row["update"] for row in progress["rows"]] == list(range(5, updates + 1, 5))
            assert progress["pending"] == []

    run_virtual(scenario())


def test_a_checkpoint_of_a_moment_in_between_knows_what_is_pending() -> None:
    async def scenario() -> None:
        world = World(answer_s=5.0)
        kept = await train(world, world.evaluations(last_update=40), 16, every=12)
        _, progress = kept.states[12]
        assert (progress["rows"], progress["pending"]) == ([], [10])

    run_virtual(scenario())


def test_no_rows_are_an_empty_file() -> None:
    assert rows_of(EvaluationProgress()) == ""
