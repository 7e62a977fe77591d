"""Starts the learner again after it was lost; the run then continues from its last checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.cli.processes import LocalProcesses
from megatron_opd.cli.resume import Resumption, find_resumption
from megatron_opd.cli.run_dir import RunDir
from megatron_opd.cli.startup import all_up
from megatron_opd.cli.supervisor import BUDGET_S
from megatron_opd.config.schema import Config
from megatron_opd.transport.zmq import RemoteLearner

LAST_WORDS_S = 2.0
"""A process that has ended may have said why; that is read a moment later."""


class LearnerRestarts:
    """Counts the restarts of one run's learner, and makes them.

    Args:
        config: how often, and how long a start may take.
        remote: what another learner can join at the same address.
        processes: where the learner runs, if it was started here.
        command: makes its command line, anew for each start: it names a free port.
        say: tells the user.
    """

    def __init__(
        self,
        config: Config,
        remote: RemoteLearner,
        processes: LocalProcesses,
        command: Callable[[], Sequence[str]],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._remote, self._processes = config, remote, processes
        self._command, self._say = command, say
        self._began_s: list[float] = []

    @property
    def count(self) -> int:
        """Returns how many restarts there have been."""
        return len(self._began_s)

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
        now_s = asyncio.get_running_loop().time()
        recent = sum(now_s - began_s < BUDGET_S for began_s in self._began_s)
        return lost and recent < self._config.learner.max_restarts

    async def again(self) -> None:
        """Start another learner, or wait for one that is started elsewhere, until it is ready.

        UserError: it does not come up.
        """
        self._began_s.append(asyncio.get_running_loop().time())
        self._remote.start_over()
        startup_s = self._config.student.startup_timeout_s
        parts = await self._processes.restart_learner(self.count, self._command())
        await all_up(self._remote, startup_s, parts, self._say)


def last_checkpoint(config: Config, wall_s: float) -> Resumption | None:
    """Return where a run continues whose learner was lost; None: at its beginning.

    wall_s: of the attempts before this process, which the checkpoint counts together with its own.

    UserError: the checkpoint is damaged.
    """
    if not StepDirs(RunDir(config.run.dir).checkpoints).complete():
        return None
    found = find_resumption(config)
    return replace(found, extras=found.extras | {"wall_s": wall_s})
