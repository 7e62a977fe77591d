"""Prepares the verifiers of a run: what must hold before it starts, and their worker processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from megatron_opd.config.environment import PythonConfig
from megatron_opd.config.schema import Config
from megatron_opd.config.wording import shown
from megatron_opd.data.judge import Judge
from megatron_opd.data.tasks import TASKS, get_task
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.data.verifiers.sandbox.run import isolation_problem
from megatron_opd.errors import RunFailed, UserError


def check_isolation(config: Config) -> None:
    """Run a program in the sandbox where a run would. UserError: the kernel denies isolation."""
    plays = isinstance(config.environment, PythonConfig)
    if not config.verifier.code.enabled and not plays:
        return
    problem = isolation_problem()
    if problem is not None and plays:
        raise UserError(
            "environment.type python needs a machine whose kernel lets the user isolate programs "
            f"in namespaces of their own: {problem}; use another environment, or see "
            "docs/verifiers.md for what the kernel must allow"
        )
    if problem is not None:
        raise UserError(
            "verifier.code.enabled true needs a machine whose kernel lets the user isolate "
            f"programs in namespaces of their own: {problem}; set it false and use another "
            "data.task, or see docs/verifiers.md for what the kernel must allow"
        )


def row_tasks(config: Config, needed: bool) -> dict[str, str]:
    """Return the verifier of each value that a row may have in data.task_key. Raises UserError.

    Those of data.tasks, and the names of built-in ones and that of data.task: a data file cannot
    name code to import. needed: whether each must give rewards.
    """
    for value, name in config.data.tasks.items():
        try:
            get_task(name)
        except ValueError as error:
            raise UserError(f"data.tasks: {shown(value, 80)}: {error}") from None
    code = {"code"} if config.verifier.code.enabled else set[str]()
    names = {config.data.task, *TASKS} - {"code"} | code
    meant = {name: name for name in sorted(names)} | config.data.tasks
    return {
        value: name
        for value, name in meant.items()
        if not needed or get_task(name).verify is not None
    }


@asynccontextmanager
async def judging(judge: Judge | None) -> AsyncIterator[None]:
    """Keep the worker processes of a judge's verifiers. RunFailed: they cannot be started."""
    async with AsyncExitStack() as stack:
        if judge is not None:
            try:
                await stack.enter_async_context(judge.verifiers)
            except VerifierFailed as failed:
                raise RunFailed(f"data.task {judge.task}: {failed.detail}") from failed
        yield
