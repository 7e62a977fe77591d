"""Asks an environment within limits, and checks what it says.

Invariant: an environment that raises, hangs, says something of another type or too much costs its
own trajectory alone: the caller gets EnvironmentFailed with a reason to count. One that keeps the
interpreter busy is hosted in a process of its own (hosted.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_opd.config.wording import described
from megatron_opd.data.chats import Chat
from megatron_opd.environments.calls import Reply
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.protocol import (
    Environment,
    EnvironmentRow,
    tools_of_environment,
)
from megatron_opd.environments.words import (
    Answered,
    bad_reply,
    read_answer,
    read_beginning,
    read_declared,
)
from megatron_opd.records.drops import (
    ENVIRONMENT_DIED,
    ENVIRONMENT_FAILED,
    ENVIRONMENT_TIMED_OUT,
)


@dataclass(frozen=True, slots=True)
class EnvironmentLimits:
    """Limits one answer of an environment. message_bytes: of all texts in it, as UTF-8."""

    timeout_s: float
    message_bytes: int


class Partner(Protocol):
    """Speaks with the student within limits; raises EnvironmentFailed, and nothing else."""

    async def start(self, row: EnvironmentRow) -> Chat:
        """Return the conversation's beginning, with the tools that there are."""
        ...

    async def step(self, reply: Reply) -> Answered:
        """Return what is answered to a turn."""
        ...


class GuardedEnvironment:
    """Stands before one environment, in this process; see Partner."""

    def __init__(self, environment: Environment, limits: EnvironmentLimits) -> None:
        self._environment, self._limits = environment, limits

    async def start(self, row: EnvironmentRow) -> Chat:
        """Return the conversation's beginning."""
        said = await self._asked(lambda: self._environment.start(row), "start")
        return read_beginning(said, self.tools(), self._limits.message_bytes)

    async def step(self, reply: Reply) -> Answered:
        """Return what is answered to a turn."""
        said = await self._asked(lambda: self._environment.step(reply), "step")
        return read_answer(said, self._limits.message_bytes)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools that the environment declares. Raises EnvironmentFailed."""
        try:
            tools = list(tools_of_environment(self._environment))
        except Exception as error:  # noqa: BLE001  an environment raises what it likes
            raise EnvironmentFailed(ENVIRONMENT_FAILED, f"tools: {described(error)}") from None
        return read_declared(tools, self._limits.message_bytes)

    async def _asked(self, call: Callable[[], Awaitable[Any]], name: str) -> Any:
        async def contained() -> Any:
            try:
                answer = call()
                if not inspect.isawaitable(answer):
                    raise bad_reply(f"{name} must be async, got {type(answer).__name__}")
                return await answer
            except (SystemExit, KeyboardInterrupt) as error:  # they would end the event loop
                raise RuntimeError(f"{name} raised {type(error).__name__}") from None

        task = asyncio.get_running_loop().create_task(contained(), name=f"environment {name}")
        try:
            await asyncio.wait({task}, timeout=self._limits.timeout_s)
            if not task.done():
                limit = f"{self._limits.timeout_s:g} s"
                raise EnvironmentFailed(ENVIRONMENT_TIMED_OUT, f"{name} took over {limit}")
            return task.result()
        except EnvironmentFailed:
            raise
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise EnvironmentFailed(ENVIRONMENT_FAILED, f"{name} cancelled itself") from None
        except MemoryError:
            raise EnvironmentFailed(ENVIRONMENT_DIED, f"{name} took too much memory") from None
        except Exception as error:  # noqa: BLE001  an environment raises what it likes
            raise EnvironmentFailed(ENVIRONMENT_FAILED, f"{name}: {described(error)}") from None
        finally:
            task.cancel()  # not waited for: it may not end
