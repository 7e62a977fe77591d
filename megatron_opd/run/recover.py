"""Starts the learner again after it was lost; the run then continues from its last checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.config.schema import Config
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.errors import PartGone, UserError
from megatron_opd.fleet.budget import Budget
from megatron_opd.fleet.startup import all_up
from megatron_opd.launch.processes import Processes
from megatron_opd.run.resume import Resumption, find_resumption
from megatron_opd.transport.remote_learner import LearnerError, RemoteLearner
from sglang_bridge.errors import WeightSyncFailed

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


def last_checkpoint(
    config: Config, wall_s: float, began: Resumption | None = None
) -> Resumption | None:
    """Return where a run continues whose learner was lost; None: at its beginning.

    wall_s: of the attempts before this process, which the checkpoint counts together with its own.
    began: where this process began, with the state that suits its data. The data is in memory: what
    became of the files in the meantime is of no account.

    UserError: the checkpoint is damaged.
    """
    if not StepDirs(RunDir(config.run.dir).checkpoints).complete():
        return None
    found = find_resumption(config, data_in_memory=True)
    if began is not None and began.path == found.path:
        found = began
    return replace(found, extras=found.extras | {"wall_s": wall_s})


async def through_losses(
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
