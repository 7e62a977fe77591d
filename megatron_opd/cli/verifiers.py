"""Prepares the verifiers of a run: what must hold before it starts, and their worker processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from megatron_opd.cli.errors import RunFailed, UserError
from megatron_opd.config.schema import Config
from megatron_opd.data.judge import Judge
from megatron_opd.data.tasks import TASKS, get_task
from megatron_opd.verifiers.reward import VerifierFailed
from megatron_opd.verifiers.sandbox.run import isolation_problem


def check_isolation(config: Config) -> None:
    """Run a program in the sandbox where a run would. UserError: the kernel denies isolation."""
    if not config.verifier.code.enabled:
        return
    problem = isolation_problem()
    if problem is not None:
        raise UserError(
            "verifier.code.enabled true needs a machine whose kernel lets the user isolate "
            f"programs in namespaces of their own: {problem}; set it false and use another "
            "data.task, or see docs/verifiers.md for what the kernel must allow"
        )


def row_tasks(config: Config, needed: bool) -> tuple[str, ...]:
    """Return the verifiers that a row may name in data.task_key.

    Only built-in ones and that of data.task: a data file cannot name code to import. needed:
    whether each must give rewards.
    """
    allowed = {config.data.task, *TASKS} - {"code"}
    if config.verifier.code.enabled:
        allowed.add("code")
    if needed:
        allowed -= {name for name in allowed if get_task(name).verify is None}
    return tuple(sorted(allowed))


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
