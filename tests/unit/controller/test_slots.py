"""What waits is worked on in the order of its uid, and never by more tasks than there are slots."""

from __future__ import annotations

import asyncio
import gc
import random
import warnings

import pytest

from megatron_opd.controller.errors import LoopFailed
from megatron_opd.controller.slots import Slots


class Stage:
    """Works on a prompt until it is let go; notes who is worked on at once."""

    def __init__(self, goes_on: bool = True) -> None:
        self.begun: list[int] = []
        self.at_once: set[int] = set()
        self.most = 0
        self.tasks: list[str] = []
        self._goes_on = goes_on

    async def work(self, uid: int) -> bool:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task.get_name())
        self.begun.append(uid)
        self.at_once.add(uid)
        self.most = max(self.most, len(self.at_once))
        for _ in range(random.Random(uid).randrange(1, 4)):
            await asyncio.sleep(0)
        self.at_once.remove(uid)
        return self._goes_on


async def worked(first: Slots, uids: list[int], *rest: Slots) -> None:
    """Put everything before the slots open, and let all of it be done."""
    for uid in uids:
        first.put(uid)
    async with asyncio.TaskGroup() as group:
        for slots in (first, *rest):
            slots.open(group)


@pytest.mark.parametrize(("rollouts", "scores"), [(1, 1), (3, 1), (1, 3), (4, 7), (50, 50)])
def test_every_prompt_passes_both_stages_once(rollouts: int, scores: int):
    rolled, scored = Stage(), Stage(goes_on=False)
    to_score = Slots("score", scores, scored.work)
    to_roll_out = Slots("rollout", rollouts, rolled.work, to_score)
    asyncio.run(worked(to_roll_out, list(range(40)), to_score))
    assert sorted(rolled.begun) == sorted(scored.begun) == list(range(40))
    assert rolled.most == min(rollouts, 40)
    assert 1 <= scored.most <= min(scores, 40)


def test_the_smallest_uid_is_worked_on_first():
    stage = Stage()
    asyncio.run(worked(Slots("rollout", 1, stage.work), [5, 3, 9, 1]))
    assert stage.begun == [1, 3, 5, 9]


def test_what_does_not_go_on_is_not_scored():
    rolled, scored = Stage(goes_on=False), Stage()
    to_score = Slots("score", 2, scored.work)
    asyncio.run(worked(Slots("rollout", 2, rolled.work, to_score), [0, 1, 2], to_score))
    assert (len(rolled.begun), scored.begun) == (3, [])


def test_a_prompt_keeps_its_task_where_a_slot_is_free():
    rolled, scored = Stage(), Stage(goes_on=False)
    to_score = Slots("score", 8, scored.work)
    asyncio.run(worked(Slots("rollout", 8, rolled.work, to_score), list(range(8)), to_score))
    assert sorted(scored.tasks) == sorted(rolled.tasks)
    assert len(set(rolled.tasks)) == 8


def test_a_rollout_slot_is_free_while_its_prompt_is_scored():
    async def run() -> None:
        score = asyncio.Event()
        rolled = Stage()

        async def scoring(uid: int) -> bool:
            await score.wait()
            return False

        to_score = Slots("score", 2, scoring)
        to_roll_out = Slots("rollout", 1, rolled.work, to_score)
        async with asyncio.TaskGroup() as group:
            to_roll_out.open(group)
            to_score.open(group)
            for uid in range(5):
                to_roll_out.put(uid)
                for _ in range(20):
                    await asyncio.sleep(0)
            assert rolled.begun == list(range(5))
            score.set()

    asyncio.run(run())


@pytest.mark.parametrize(("broken", "loop"), [("rollout", "rollout-0"), ("score", "score-0")])
def test_a_failure_names_its_stage(broken: str, loop: str):
    async def fails(uid: int) -> bool:
        raise OSError("gone")

    stage = Stage()
    to_score = Slots("score", 1, fails if broken == "score" else stage.work)
    to_roll_out = Slots("rollout", 1, fails if broken == "rollout" else stage.work, to_score)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(worked(to_roll_out, [0], to_score))
    (failure,) = caught.value.exceptions
    assert isinstance(failure, LoopFailed)
    assert failure.loop == loop


def test_closing_ends_what_is_worked_on_and_what_waits():
    async def run() -> None:
        begun: list[int] = []

        async def forever(uid: int) -> bool:
            begun.append(uid)
            await asyncio.Event().wait()
            return True

        slots = Slots("rollout", 2, forever)
        async with asyncio.TaskGroup() as group:
            slots.open(group)
            for uid in range(4):
                slots.put(uid)
            await asyncio.sleep(0)
            slots.close()
            slots.put(9)
        assert begun == [0, 1]

    asyncio.run(run())


def test_what_comes_while_the_group_ends_is_not_begun_and_leaves_no_coroutine() -> None:
    async def fails() -> None:
        raise ValueError("first")

    async def main() -> None:
        stage = Stage()
        slots = Slots("stage", 2, stage.work)

        async def late() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                slots.put(1)
                slots.put(2)

        async def play() -> None:
            async with asyncio.TaskGroup() as group:
                slots.open(group)
                group.create_task(late())
                await asyncio.sleep(0)
                group.create_task(fails())

        with pytest.raises(ExceptionGroup) as failures:
            await play()
        assert [str(error) for error in failures.value.exceptions] == ["first"]
        assert stage.begun == []

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert found == []
