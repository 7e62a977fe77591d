"""Starts, restarts and ends the data workers of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.errors import UserError
from megatron_opd.launch.handles import LearnerHandle
from megatron_opd.launch.launcher import CannotPlace
from megatron_opd.launch.machines import Machines
from megatron_opd.wire.keys import RunKeys
from sglang_bridge.errors import exit_text
from sglang_bridge.server.launch import last_lines

GRACE_S = 4.0
POLL_S = 0.2


class DataWorkers:
    """Keeps the run's data workers.

    Args:
        machines: what they are started on; its configuration says how many.
        keys: the run's.
        max_bytes: the largest sample.
        logs: where each writes its output.
        say: tells the user.
    """

    def __init__(
        self,
        machines: Machines,
        keys: RunKeys,
        max_bytes: int,
        logs: Path,
        say: Callable[[str], None],
    ) -> None:
        config = machines.config
        self._machines, self._keys, self._logs, self._say = machines, keys, logs, say
        self._count, self._restarts = config.workers.count, config.workers.restarts
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """What replaced a worker, and watches the new one until that is lost."""
        host = config.learner.listen_host
        self.pool = WorkerPool(self._count, host, keys, max_bytes, self._again)
        self.processes: list[LearnerHandle] = []

    def start(self, config_file: Path) -> None:
        """Start all of them; call inside the event loop. config_file: the resolved one."""
        self.pool.connections.open()
        for index in range(self._count):
            log = self._logs / f"data-worker-{index}.log"
            address, keys = self.pool.connections.address, self._keys.ranks
            process = self._machines.worker(index, config_file, address, keys, log)
            self.processes.append(process)
            process.start()

    async def ready(self, timeout_s: float) -> None:
        """Return once all are there. UserError, with the log's end: one ended, or took longer."""
        ready = asyncio.ensure_future(self.pool.ready())
        try:
            async with asyncio.timeout(timeout_s):
                while not ready.done():
                    for index, process in enumerate(self.processes):
                        if (code := process.exit_code()) is not None:
                            raise UserError(
                                f"data worker {index} ended with {exit_text(code)} during "
                                f"start-up; {_end_of(process)}"
                            )
                    await asyncio.wait({ready}, timeout=POLL_S)
                await ready
        except TimeoutError:
            raise UserError(f"the data workers were not there within {timeout_s:g} s") from None
        finally:
            ready.cancel()

    async def stop(self) -> None:
        """End all of them."""
        self.pool.connections.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(each.stop, GRACE_S) for each in self.processes))

    def _again(self, index: int) -> bool:
        """Start a worker that was lost once more, unless that was done too often."""
        if not self._restarts:
            return False
        self._restarts -= 1
        before = self._tasks.get(index)
        if before is not None:  # or it would take the one that comes for one that never came
            before.cancel()
        self._tasks[index] = asyncio.create_task(self._replace(index))
        return True

    async def _replace(self, index: int) -> None:
        old = self.processes[index]
        await asyncio.to_thread(old.stop, 0)
        self._say(f"data worker {index} is lost and started again; {_end_of(old)}")
        try:
            new = await asyncio.to_thread(old.again)
        except CannotPlace as error:
            self._say(f"data worker {index} is not started again: {error}")
            self.pool.give_up()
            return
        self.processes[index] = new
        new.start()
        while new.exit_code() is None:  # a process has no event to wait on  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        # one that never came has no connection to lose
        self.pool.never_came(index)


def _end_of(process: LearnerHandle) -> str:
    assert process.log is not None
    return f"the end of {process.log}:\n{last_lines(process.log)}"
