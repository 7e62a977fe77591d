"""Evaluations beside a run that trains, on a virtual clock."""

import asyncio
from typing import Any

import pytest

from megatron_opd.evaluation.progress import progress_from
from megatron_opd.sim.clock import run_virtual
from tests.support.evaluating import World, some_set

BOTH = {"easy": some_set(10), "hard": some_set(50, problems=3, samples=2)}


def places(world: World) -> list[tuple[int, str]]:
    return [(row["update"], row["set"]) for row in world.rows]


def test_training_goes_on_while_an_evaluation_runs() -> None:
    async def scenario() -> None:
        world = World(answer_s=0.42, right={10, 11, 12})
        found = world.evaluations(BOTH)
        await world.train(found, 20)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0), "nothing waited"
        await found.finish()
        assert places(world) == [(10, "easy"), (10, "hard"), (20, "easy"), (20, "hard")]
        easy, hard = world.rows[:2]
        assert (easy["accuracy_pct"], easy["problems"]) == (75.0, 4)
        assert hard["pass_at_k"] == {"1": 0.0, "2": 0.0}
        # begun after 10 updates; a set takes 0.42 s, an update 0.1 s
        assert (easy["version_min"], easy["version_max"], easy["lag_steps"]) == (10, 14, 4)
        assert (hard["version_min"], hard["lag_steps"]) == (14, 8)
        assert easy["seconds"] == pytest.approx(0.42)
        assert easy["time_s"] == pytest.approx(1.42)
        assert world.said[0].startswith("after 10 updates on easy: avg@1 75.0%")

    run_virtual(scenario())


def test_requests_beside_training_have_a_limit_of_their_own() -> None:
    async def scenario() -> None:
        world = World()
        found = world.evaluations({"easy": some_set(10, problems=9)}, concurrency=2)
        await found.before({})
        assert world.most_in_flight == 9, "before the run: that of the plan"
        world.most_in_flight = 0
        await world.train(found, 10)
        await found.finish()
        assert world.most_in_flight == 2

    run_virtual(scenario())


def test_one_that_is_due_while_another_runs_is_skipped_and_counted() -> None:
    async def scenario() -> None:
        world = World(answer_s=2.5)
        found = world.evaluations()
        await world.train(found, 50)
        await found.finish()
        assert places(world) == [(10, "easy"), (40, "easy")]
        assert found.skipped == 3
        assert [line for line in world.said if "skipped" in line] == [
            "the evaluation after 20 updates is skipped, because that after 10 still runs; more "
            "of this kind are only counted (evaluations_skipped)"
        ]
        assert found.progress().pending == ()

    run_virtual(scenario())


def test_training_waits_where_it_is_asked_to() -> None:
    async def scenario() -> None:
        world = World(answer_s=5.0)
        found = world.evaluations(BOTH, blocks=True)
        await world.train(found, 20)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0 + 2 * 2 * 5.0)
        assert places(world) == [(10, "easy"), (10, "hard"), (20, "easy"), (20, "hard")]
        for row in world.rows:
            assert row["version_min"] == row["version_max"] == row["update"], "of one version"
            assert row["lag_steps"] == 0
        assert found.skipped == 0

    run_virtual(scenario())


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_the_last_weights_are_evaluated_once(blocks: bool, after: bool) -> None:
    async def scenario() -> None:
        world = World(answer_s=0.3)
        found = world.evaluations(last_update=20, blocks=blocks, after=after)
        await world.train(found, 20)
        await found.finish()
        lines = await found.after(20)
        assert places(world) == [(10, "easy"), (20, "easy")]
        assert len(lines) == after
        assert found.progress().pending == ()

    run_virtual(scenario())


def test_the_end_of_the_run_waits_for_what_still_runs() -> None:
    async def scenario() -> None:
        world = World(answer_s=30.0)
        found = world.evaluations(every=5, last_update=15)
        await world.train(found, 15)
        assert places(world) == []
        assert found.progress().pending == (5, 15)
        assert found.skipped == 1, "the last one is not left out, whatever runs"
        world.answer_s = 0.1
        (line,) = await found.after(15)
        assert places(world) == [(5, "easy"), (15, "easy")]
        assert line.startswith("student after: avg@1 0.0%")

    run_virtual(scenario())


def test_the_last_weights_stay_pending_while_an_earlier_evaluation_ends() -> None:
    async def scenario() -> None:
        world = World(answer_s=30.0)
        found = world.evaluations(every=5, last_update=15)
        await world.train(found, 15)
        await found.finish()
        assert found.progress().pending == (15,), "the run may still be preempted"

    run_virtual(scenario())


def test_an_evaluation_that_fails_is_counted_and_ends_nothing() -> None:
    async def scenario() -> None:
        world = World(answer_s=0.3, broken={11})
        found = world.evaluations(BOTH, last_update=25)
        await world.train(found, 25)
        await found.finish()
        assert places(world) == [(10, "hard"), (20, "hard")]
        assert found.failed == 2
        assert [line for line in world.said if "failed" in line] == [
            "the evaluation of easy after 10 updates failed, the run goes on: ConnectionError: "
            "server gone; more of this kind are only counted (evaluations_failed)"
        ]
        assert len(await found.after(25)) == 1
        assert found.failed == 3
        assert found.progress().pending == (), "what failed is not tried for ever"

    run_virtual(scenario())


def test_a_failure_before_the_run_is_raised() -> None:
    async def scenario() -> None:
        world = World(broken={11})
        with pytest.raises(ConnectionError):
            await world.evaluations().before({})

    run_virtual(scenario())


def test_student_and_teachers_are_evaluated_before_the_run() -> None:
    async def scenario() -> None:
        world, other = World(right={10}), World(right={10, 11, 50})
        found = world.evaluations(BOTH)
        lines = await found.before({"teacher": other, "math": World()})
        assert [line.split(":")[0] for line in lines] == [
            *("student before on easy", "student before on hard"),
            *("teacher on easy", "teacher on hard"),
            *("teacher math on easy", "teacher math on hard"),
        ]
        assert places(world) == [(0, "easy"), (0, "hard")]
        assert found.teachers["teacher"]["easy"].accuracy_pct == 50
        assert found.teachers["math"]["easy"].accuracy_pct == 0
        assert await world.evaluations(before=False).before({"teacher": other}) == []
        assert await world.evaluations({}).before({"teacher": other}) == []

    run_virtual(scenario())


def test_the_run_stops_early_when_nothing_is_gained_any_more() -> None:
    async def scenario() -> None:
        world = World(right={10})
        found = world.evaluations(BOTH, patience=2, best_set="easy")
        await found.before({})
        world.right |= {11, 50}
        await world.train(found, 10)  # a gain
        await found.finish()
        world.right |= {51, 52}  # of the other set
        await world.train(found, 20)
        await found.finish()
        assert world.ended_early == 0
        await world.train(found, 30)
        await found.finish()
        assert (world.ended_early, found.stopped_at) == (1, 30)
        assert any("2 evaluations of easy in a row brought no gain" in line for line in world.said)
        await world.train(found, 40)
        await found.finish()
        assert world.ended_early == 1, "it is told once"

    run_virtual(scenario())


def test_a_failed_evaluation_is_no_sign_that_nothing_is_gained() -> None:
    async def scenario() -> None:
        world = World(answer_s=0.3, right={10})
        found = world.evaluations(patience=1)
        await found.before({})
        world.broken = {11}
        await world.train(found, 20)
        await found.finish()
        assert (found.failed, world.ended_early) == (2, 0)

    run_virtual(scenario())


@pytest.mark.parametrize("how", ["interrupt", "abandon"])
def test_what_was_interrupted_is_evaluated_again_and_nothing_twice(how: str) -> None:
    async def scenario() -> None:
        world = World(answer_s=1.0, right={10})
        found = world.evaluations(BOTH)
        await found.before({})
        await world.train(found, 22)  # the second set of 10 is complete at 30 updates
        if how == "interrupt":
            found.interrupt()
            await found.finish()
        else:
            await found.abandon()
        kept = found.progress()
        assert kept.pending == (10,)
        assert kept.skipped == 1
        assert world.in_flight == 0
        later = World(right={10})
        later.updates = 22
        again = later.evaluations(BOTH)
        again.restore(progress_from(kept.as_json()))
        await again.again()
        assert again.skipped == 1
        await again.finish()
        assert places(later) == [(10, "hard")]
        (row,) = later.rows
        assert (row["version_min"], row["lag_steps"]) == (22, 12), "by the weights there are"
        assert len(again.rows) == 4
        assert again.progress().pending == ()

    run_virtual(scenario())


def test_a_resumed_run_waits_for_what_was_pending_if_it_blocks() -> None:
    async def scenario() -> None:
        for blocks in (True, False):
            world = World()
            world.updates = 10
            found = world.evaluations(blocks=blocks)
            kept = found.progress().as_json() | {"pending": [10]}
            found.restore(progress_from(kept))
            await found.again()
            assert places(world) == [(10, "easy")] * blocks
            await found.finish()
            assert places(world) == [(10, "easy")]

    run_virtual(scenario())


def test_a_preempted_run_does_not_wait_for_the_evaluation_that_blocks_it() -> None:
    async def scenario() -> None:
        world = World(answer_s=1e6)
        found = world.evaluations(blocks=True)
        training = asyncio.create_task(world.train(found, 10))
        await asyncio.sleep(5)
        found.interrupt()
        await training
        assert asyncio.get_running_loop().time() == pytest.approx(5)
        assert found.progress().pending == (10,)

    run_virtual(scenario())


def test_patience_goes_on_where_it_was() -> None:
    async def scenario() -> None:
        world = World()
        found = world.evaluations(patience=2)
        await found.before({})
        await world.train(found, 10)
        await found.finish()
        later = World()
        later.updates = 10
        again = later.evaluations(patience=2)
        again.restore(progress_from(found.progress().as_json()))
        await later.train(again, 20)
        await again.finish()
        assert (world.ended_early, later.ended_early) == (0, 1)

    run_virtual(scenario())


def test_the_checkpoints_that_may_be_best_are_wanted() -> None:
    async def scenario() -> None:
        world = World(answer_s=0.5, right={10, 11})
        found = world.evaluations()
        assert found.wanted == frozenset()
        await world.train(found, 10)
        assert found.wanted == {10}
        await found.finish()
        world.right = {10}
        await world.train(found, 20)
        assert found.wanted == {10, 20}
        await found.finish()
        assert found.wanted == {10}
        world.right = {10, 11, 12}
        await world.train(found, 30)
        await found.finish()
        assert found.wanted == {30}

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("settings", "due"),
    [({"every": 0}, []), ({"every": 4}, [4, 8, 12]), ({"every": 1}, list(range(1, 13)))],
)
def test_when_an_evaluation_falls_due(settings: dict[str, Any], due: list[int]) -> None:
    found = World().evaluations(**settings)
    assert [n for n in range(13) if found.falls_on(n)] == due
    assert not World().evaluations({}, every=1).falls_on(1), "nothing to evaluate"
