"""A part that is gone ends what the controller is doing outside its loops too."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megatron_opd.errors import LearnerError, PartGone
from megatron_opd.fleet.guards import RunGuard, while_alive
from megatron_opd.launch.health import HealthGuard, ProcessDied, WatchedProcess


class Learner:
    """A learner whose rank is gone once `gone` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def failed(self) -> LearnerError:
        await self.gone.wait()
        return LearnerError("learner rank 0 is gone: its connection ended", final=False)


def process(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


def guarded(body: Callable[[RunGuard, Learner], Awaitable[None]], *watched: WatchedProcess) -> None:
    async def main() -> None:
        learner: Any = Learner()
        await body(RunGuard(lambda: HealthGuard(watched, interval_s=0.01), learner), learner)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_learner_that_is_gone_ends_an_evaluation():
    """Before: it was missed at the next update, after the whole evaluation."""
    ended: list[str] = []

    async def evaluation() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("cancelled")

    async def body(guard: RunGuard, learner: Learner) -> None:
        asyncio.get_running_loop().call_later(0.05, learner.gone.set)
        with pytest.raises(PartGone, match=r"^learner rank 0 is gone: its connection ended$"):
            await while_alive(guard, evaluation())

    guarded(body)
    assert ended == ["cancelled"]


def test_work_that_ends_or_fails_by_itself_does_so():
    async def right() -> int:
        return 3

    async def wrong() -> int:
        raise ValueError("its own")

    async def body(guard: RunGuard, learner: Learner) -> None:
        assert await while_alive(guard, right()) == 3
        with pytest.raises(ValueError, match="its own"):
            await while_alive(guard, wrong())

    guarded(body)


def test_a_dead_process_says_more_than_its_connection():
    async def body(guard: RunGuard, learner: Learner) -> None:
        learner.gone.set()
        with pytest.raises(ProcessDied, match=r"^the learner ended with exit code 3$"):
            await guard.watch()

    dead = process("import sys; sys.exit(3)")
    guarded(body, WatchedProcess("the learner", dead.poll))


def test_a_rank_is_named_where_every_process_lives():
    async def body(guard: RunGuard, learner: Learner) -> None:
        learner.gone.set()
        with pytest.raises(LearnerError, match="rank 0 is gone"):
            await guard.watch()

    alive = process("import time; time.sleep(60)")
    try:
        guarded(body, WatchedProcess("the learner", alive.poll))
    finally:
        alive.kill()
        alive.wait()
