"""Starts, restarts and ends the data workers of a run, on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.learner_process import LearnerProcess
from megatron_opd.config.schema import Config
from megatron_opd.transport.keys import RunKeys
from megatron_opd.workers.pool import WorkerPool
from sglang_bridge.server.launch import last_lines

GRACE_S = 4.0
POLL_S = 0.2
THREADS = 1


class DataWorkers:
    """Keeps the run's data workers.

    Args:
        host: what they and the controller talk at.
        keys: the run's.
        max_bytes: the largest sample.
        logs: where each writes its output.
        say: tells the user.
    """

    def __init__(
        self,
        config: Config,
        host: str,
        keys: RunKeys,
        max_bytes: int,
        logs: Path,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._host, self._keys, self._logs = config, host, keys, logs
        self._say = say
        self._left = config.workers.restarts
        self._ended: list[asyncio.Future[None]] = []
        self.pool = WorkerPool(config.workers.count, host, keys, max_bytes, self._again)
        self.processes: list[LearnerProcess] = []

    def start(self, config_file: Path) -> None:
        """Start all of them; call inside the event loop. config_file: the resolved one."""
        self.pool.open()
        for index in range(self._config.workers.count):
            command = [
                *(sys.executable, "-m", "megatron_opd.cli.data_worker", str(config_file)),
                *("--controller", self.pool.address, "--index", str(index), "--host", self._host),
            ]
            log = self._logs / f"data-worker-{index}.log"
            process = LearnerProcess(command, log, THREADS, self._keys.ranks)
            self.processes.append(process)
            process.start()

    async def ready(self, timeout_s: float) -> None:
        """Return once all are there. UserError, with the log's end: one ended, or took longer."""
        ready = asyncio.ensure_future(self.pool.ready())
        try:
            async with asyncio.timeout(timeout_s):
                while not ready.done():
                    for index, process in enumerate(self.processes):
                        if process.exit_code() is not None:
                            raise UserError(
                                f"data worker {index} ended with exit code {process.exit_code()} "
                                f"during start-up; {self._end_of(process)}"
                            )
                    await asyncio.wait({ready}, timeout=POLL_S)
        except TimeoutError:
            raise UserError(f"the data workers were not there within {timeout_s:g} s") from None
        finally:
            ready.cancel()

    async def stop(self) -> None:
        """End all of them."""
        self.pool.close()
        await asyncio.gather(*self._ended)
        await asyncio.gather(*(asyncio.to_thread(each.stop, GRACE_S) for each in self.processes))

    def _again(self, index: int) -> bool:
        """Start a worker that was lost once more, unless that was done too often."""
        if not self._left:
            return False
        self._left -= 1
        old = self.processes[index]
        new = self.processes[index] = old.again()

        def replace() -> None:
            old.stop(0)
            new.start()

        self._ended.append(asyncio.ensure_future(asyncio.to_thread(replace)))
        self._say(f"data worker {index} is lost and started again; {self._end_of(old)}")
        return True

    @staticmethod
    def _end_of(process: LearnerProcess) -> str:
        assert process.log is not None
        return f"the end of {process.log}:\n{last_lines(process.log)}"
