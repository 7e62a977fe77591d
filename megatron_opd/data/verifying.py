"""Asks the verifiers of a run, each where it belongs: in this process, or in a worker's.

Invariant: what may hang, raise or take memory runs in a worker process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_opd.config.verifier import VerifierConfig
from megatron_opd.data.tasks import TASKS, get_task, get_verifier
from megatron_opd.data.tasks.base import Verifier
from megatron_opd.data.tasks.code import CODE
from megatron_opd.data.verifiers.messages import Call
from megatron_opd.data.verifiers.pool import PoolLimits, VerifierPool
from megatron_opd.data.verifiers.reward import VerifierFailed, checked_reward
from megatron_opd.records.drops import VERIFIER_FAILED
from megatron_opd.records.types import RightAnswer


class TaskVerifiers:
    """Asks verifiers by the name of their task; enter it as an async context manager first.

    tasks: the names, each with a verifier; ValueError: one has none. Entering raises VerifierFailed
    where workers cannot be started.
    """

    def __init__(self, tasks: Iterable[str], settings: VerifierConfig) -> None:
        self._here: dict[str, Verifier] = {}
        calls: dict[str, Call] = {}
        for name in dict.fromkeys(tasks):
            verify = get_verifier(name)
            if get_task(name).bounded:
                self._here[name] = verify
            else:
                calls[name] = call_of(name, settings)
        limits = PoolLimits(settings.workers, settings.timeout_s, settings.memory_bytes)
        self._pool = VerifierPool(calls, limits) if calls else None

    @property
    def pids(self) -> tuple[int, ...]:
        """Returns the process ids of the workers."""
        return () if self._pool is None else self._pool.pids

    async def __aenter__(self) -> TaskVerifiers:
        """Start the workers, if any verifier needs them."""
        if self._pool is not None:
            await self._pool.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """End the workers."""
        if self._pool is not None:
            await self._pool.__aexit__(*exception)

    async def verify(self, task: str, response: str, answer: RightAnswer) -> float:
        """Return the reward in [0, 1] that `task` gives a response: of several answers the best.

        Raises VerifierFailed.
        """
        answers = (answer,) if isinstance(answer, str) else answer
        joined = get_task(task).joined
        if len(answers) > 1 and joined is not None:
            try:
                answers = (joined(answers),)
            except ValueError as error:
                raise VerifierFailed(VERIFIER_FAILED, f"{task}: {error}") from None
        best = 0.0
        for each in answers:
            best = max(best, await self._verify(task, response, each))
            if best == 1:
                break
        return best

    async def _verify(self, task: str, response: str, answer: str) -> float:
        here = self._here.get(task)
        if here is not None:
            return checked_reward(here(response, answer))
        assert self._pool is not None, f"no verifier of {task} was asked for"
        return await self._pool.verify(task, response, answer)


def call_of(name: str, settings: VerifierConfig) -> Call:
    """Return how a worker calls a task's verifier: by where it is imported from."""
    if name not in TASKS:
        return Call(name)  # a user's own, MODULE:FUNCTION
    task = TASKS[name]
    options = settings.code.model_dump(exclude={"enabled"}) if task is CODE else {}
    return Call(path_of(get_verifier(name)), options, task.warm and path_of(task.warm))


def path_of(function: Callable[..., object]) -> str:
    """Return the import path of a function of a module."""
    return f"{function.__module__}:{function.__name__}"
