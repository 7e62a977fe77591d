"""Starts the learner again after it was lost; the run then continues from its last checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any, TypeVar

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.config.schema import Config
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.errors import LearnerError, PartGone, UserError
from megatron_opd.evaluation.progress import EvaluationProgress, rows_of
from megatron_opd.fleet.budget import Budget
from megatron_opd.fleet.startup import all_up
from megatron_opd.launch.processes import Processes
from megatron_opd.run.attempt import Attempt, Beginning, begin_attempt
from megatron_opd.run.resume import Resumption, find_resumption, state_of
from megatron_opd.run.stages import Ready, Up
from megatron_opd.transport.remote_learner import RemoteLearner
from sglang_bridge.errors import WeightSyncFailed, one_line

ResultT = TypeVar("ResultT")

MAY_MEAN_LOST = (LoopFailed, PartGone, LearnerError, WeightSyncFailed, UserError)
"""What a lost learner ends with, while it trains, syncs its first weights, or starts again."""

LAST_WORDS_S = 2.0
"""A process that has ended may have said why; that is read a moment later."""


class LearnerRestarts:
    """Counts the restarts of one run's learner, and makes them.

    Args:
        config: how often, and how long a start may take.
        remote: what another learner can join at the same address.
        processes: where the learner runs, if it was started here.
        say: tells the user.
    """

    def __init__(
        self,
        config: Config,
        remote: RemoteLearner,
        processes: Processes,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._remote, self._processes = config, remote, processes
        self._say = say
        self._budget = Budget()

    @property
    def count(self) -> int:
        """Returns how many restarts there have been."""
        return self._budget.spent

    async def possible(self) -> bool:
        """Return whether the learner is lost, and may be started again.

        Not after what would happen again, such as a loss that is not a number.
        """
        ended = self._processes.learner_ended
        if ended and self._remote.failure is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._remote.failed(), LAST_WORDS_S)
        failure = self._remote.failure
        lost = ended if failure is None else not failure.final
        return lost and self._budget.recent < self._config.learner.max_restarts

    async def again(self) -> None:
        """Start another learner, or wait for one that is started elsewhere, until it is ready.

        UserError: it does not come up.
        """
        self._budget.spend()
        self._remote.start_over()
        startup_s = self._config.student.startup_timeout_s
        parts = await self._processes.restart_learner()
        await all_up(self._remote, startup_s, parts, self._say)


def last_checkpoint(config: Config, began: Resumption | None = None) -> Resumption | None:
    """Return where a run continues whose learner was lost; None: at its beginning.

    began: where this process began, with the state that suits its data. The data is in memory: what
    became of the files in the meantime is of no account.

    UserError: the checkpoint is damaged.
    """
    if not StepDirs(RunDir(config.run.dir).checkpoints).complete():
        return None
    found = find_resumption(config, data_in_memory=True)
    return began if began is not None and began.path == found.path else found


async def with_recovery(
    attempt: Callable[[], Awaitable[ResultT]],
    recover: Callable[[], Awaitable[None]],
    lost: Callable[[Exception], Awaitable[bool]],
) -> ResultT:
    """Return what `attempt` does; each time that the learner is lost, recover and attempt again.

    recover: may itself meet a learner that is lost. lost: whether an error means that it is, and it
    may be started again; every other error is raised.
    """
    is_lost = False
    while True:
        try:
            if is_lost:
                await recover()
            return await attempt()
        except MAY_MEAN_LOST as error:
            if not await lost(error):
                raise
        is_lost = True


class Training:
    """Makes all updates of a run, from its last checkpoint again whenever the learner was lost.

    Args:
        ready, up: the run.
        before: what was evaluated before the first update.
        closers: what ends an attempt, in case the run ends in its course.
    """

    def __init__(
        self, ready: Ready, up: Up, before: EvaluationProgress, closers: AsyncExitStack
    ) -> None:
        self._ready, self._up, self._closers = ready, up, closers
        self._beginning = Beginning(ready.resumed, before)
        self._restarts = LearnerRestarts(ready.config, ready.remote, ready.processes, ready.say)
        updates = state_of(ready.resumed).updates
        self._updates: Callable[[], int] = lambda: updates
        self._rolled_back = 0
        ready.summary.follow("training", self._figures)

    async def all_updates(self) -> Attempt:
        """Make them; return the attempt that made the last one."""
        return await with_recovery(self._attempt, self._recover, self._lost)

    async def _attempt(self) -> Attempt:
        attempt = await begin_attempt(self._ready, self._up, self._beginning, self._closers)
        self._updates = lambda: attempt.controller.accounting.updates
        await attempt.run()
        return attempt

    async def _lost(self, error: Exception) -> bool:
        """Return whether the learner was lost and may be started again; end what it made."""
        if not await self._restarts.possible():
            return False
        self._ready.say(f"the learner is lost and started again: {one_line(str(error))}")
        await self._closers.aclose()
        return True

    async def _recover(self) -> None:
        """Start another learner, and continue as if nothing had been done since the checkpoint."""
        ready = self._ready
        await self._restarts.again()
        resumed = last_checkpoint(ready.config, ready.resumed)
        beginning = self._beginning = replace(self._beginning, resumed=resumed, again=True)
        state = state_of(resumed)
        self._rolled_back += self._updates() - state.updates
        self._updates = lambda: state.updates
        ready.say(f"the learner is up, and continues from update {state.updates}")
        ready.run_dir.rewind(state.updates, rows_of(beginning.evaluated))
        await self._up.sampling.start_over(state)

    def _figures(self) -> dict[str, Any]:
        return {
            "learner_restarts": self._restarts.count,
            "updates_rolled_back": self._rolled_back,
        }
