"""Asks verifiers in worker processes, many at once, off the event loop.

Invariant: a verifier that hangs, raises, dies or returns nonsense costs its own response alone:
the caller gets VerifierFailed with a reason to count, and every other worker goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_opd.data.verifiers.messages import Ask, Call, Setup
from megatron_opd.data.verifiers.process import WorkerProcess
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.records.drops import VERIFIER_BAD_REWARD, VERIFIER_DIED, VERIFIER_FAILED

_STILL_FIT = (VERIFIER_FAILED, VERIFIER_BAD_REWARD)
"""After these a worker is asked again; after any other reason another one takes its place."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits the pool.

    workers: processes. timeout_s: of one judgement. memory_bytes: of one process's address space.
    """

    workers: int
    timeout_s: float
    memory_bytes: int


class VerifierPool:
    """Keeps worker processes while entered as an async context manager.

    calls: the verifiers by task. Entering raises VerifierFailed where they cannot be imported.
    """

    def __init__(self, calls: Mapping[str, Call], limits: PoolLimits) -> None:
        self._setup = Setup(dict(calls), limits.memory_bytes)
        self._limits = limits
        self._workers: set[WorkerProcess] = set()
        self._idle: asyncio.Queue[WorkerProcess | None] = asyncio.Queue()
        self._ending: set[asyncio.Task[None]] = set()
        self._entered = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Returns the process ids of the workers."""
        return tuple(sorted(worker.pid for worker in self._workers))

    async def __aenter__(self) -> VerifierPool:
        """Start every worker and wait until its verifiers are imported."""
        try:
            for _ in range(self._limits.workers):
                self._idle.put_nowait(self._start())
            await asyncio.gather(*(worker.ready() for worker in self._workers))
        except BaseException:
            await self._close()
            raise
        self._entered = True
        return self

    async def __aexit__(self, *exception: object) -> None:
        """End every worker."""
        await self._close()

    async def verify(self, task: str, response: str, answer: str) -> float:
        """Return the reward in [0, 1] that `task` gives a response. Raises VerifierFailed.

        Waits for an idle worker first; that wait does not count as the verifier's time.
        """
        assert self._entered, "a pool is entered before it is asked"
        worker = await self._idle.get()
        fit = False
        try:
            if worker is None:
                worker = self._start()
            reward = await worker.ask(Ask(task, response, answer), self._limits.timeout_s)
            fit = True
            return reward
        except OSError as error:
            raise VerifierFailed(VERIFIER_DIED, f"a worker cannot be started: {error}") from error
        except VerifierFailed as failed:
            fit = failed.reason in _STILL_FIT
            raise
        finally:
            # of a cancelled question too: its answer would be taken for the next one's
            self._idle.put_nowait(worker if fit else self._replaced(worker))

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess(self._setup)
        self._workers.add(worker)
        return worker

    def _replaced(self, worker: WorkerProcess | None) -> None:
        """Let `worker` end; the next question starts another in its place."""
        if worker is not None and worker in self._workers:
            self._workers.remove(worker)
            task = asyncio.get_running_loop().create_task(worker.end(), name="end a verifier")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _close(self) -> None:
        self._entered = False
        workers, self._workers = self._workers, set()
        self._idle = asyncio.Queue()
        await asyncio.gather(*(worker.end() for worker in workers), *self._ending)
