"""When a learner is started again, and where the run continues."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opd.errors import LearnerError
from megatron_opd.run import recover as learner_restart
from megatron_opd.run.recover import LearnerRestarts, last_checkpoint
from megatron_opd.sim.clock import run_virtual
from tests.support.config_files import minimal


class Remote:
    """The learner's connection. last_words: what arrives a moment after its process has ended."""

    def __init__(
        self, failure: LearnerError | None, last_words: LearnerError | None = None
    ) -> None:
        self.failure, self._last_words = failure, last_words
        self.started_over = 0

    async def failed(self) -> LearnerError:
        await asyncio.sleep(1)
        if self._last_words is None:
            await asyncio.Event().wait()
        self.failure = self._last_words
        assert self.failure is not None
        return self.failure

    def start_over(self) -> None:
        self.failure, self.started_over = None, self.started_over + 1


def restarts(remote: Remote, *, ended: bool, max_restarts: int = 3) -> LearnerRestarts:
    processes: Any = SimpleNamespace(learner_ended=ended)
    anyone: Any = remote
    config = minimal(learner={"max_restarts": max_restarts})
    return LearnerRestarts(config, anyone, processes, lambda line: None)


GONE, FINAL = LearnerError("rank 0 is gone", final=False), LearnerError("NotFinite: the loss")


@pytest.mark.parametrize(
    ("remote", "ended", "possible"),
    [
        (Remote(None), False, False),  # the run ended for another reason
        (Remote(GONE), False, True),
        (Remote(FINAL), False, False),
        (Remote(None), True, True),
        (Remote(None, GONE), True, True),
        (Remote(None, FINAL), True, False),  # it said why, just before its process ended
    ],
)
def test_what_would_happen_again_is_not_tried_again(remote: Remote, ended: bool, possible: bool):
    assert run_virtual(restarts(remote, ended=ended).possible()) is possible


def test_the_budget_is_for_an_hour(monkeypatch: pytest.MonkeyPatch):
    async def up(*_: object) -> None: ...

    monkeypatch.setattr(learner_restart, "all_up", up)
    remote = Remote(GONE)
    tried = restarts(remote, ended=False, max_restarts=2)
    tried._processes.restart_learner = lambda: asyncio.sleep(0, {})

    async def scenario() -> None:
        for _ in range(2):
            remote.failure = GONE
            assert await tried.possible()
            await tried.again()
        remote.failure = GONE
        assert not await tried.possible()
        await asyncio.sleep(3600)
        assert await tried.possible()
        assert (tried.count, remote.started_over) == (2, 2)

    run_virtual(scenario())


def test_without_a_checkpoint_a_run_continues_at_its_beginning(tmp_path: Path):
    assert last_checkpoint(minimal(run={"dir": str(tmp_path)})) is None
