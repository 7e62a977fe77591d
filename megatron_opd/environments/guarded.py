"""Asks an environment within limits, and checks what it says.

Invariant: an environment that raises, hangs, says something of another type or too much costs its
own trajectory alone: the caller gets EnvironmentFailed with a reason to count. One that keeps the
interpreter busy is hosted in a process of its own (hosted.py).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_opd.config.wording import line, shown
from megatron_opd.data.calls import read_tools
from megatron_opd.data.chats import ASSISTANT, TOOL, USER, Chat, RowChat
from megatron_opd.data.faults import Unusable
from megatron_opd.data.messages import read_chat
from megatron_opd.environments.calls import Reply
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.protocol import (
    Environment,
    EnvironmentRow,
    Said,
    TrajectoryEnd,
    tools_of_environment,
)
from megatron_opd.records.drops import (
    ENVIRONMENT_BAD_REPLY,
    ENVIRONMENT_DIED,
    ENVIRONMENT_FAILED,
    ENVIRONMENT_TIMED_OUT,
    ENVIRONMENT_TOO_LONG,
)

_SAYS = "messages"


@dataclass(frozen=True, slots=True)
class EnvironmentLimits:
    """Limits one answer of an environment. message_bytes: of all texts in it, as UTF-8."""

    timeout_s: float
    message_bytes: int


@dataclass(frozen=True, slots=True)
class Answered:
    """Holds a checked answer. messages: none at the end, which is `ended`. reward: if given."""

    messages: Chat
    reward: float | None
    ended: bool


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
        chat = self._chat(said)
        if chat[-1].role == ASSISTANT:
            raise _bad("start must not say an assistant's message last, which the student writes")
        return RowChat.of(chat, self.tools())

    async def step(self, reply: Reply) -> Answered:
        """Return what is answered to a turn."""
        said = await self._asked(lambda: self._environment.step(reply), "step")
        if isinstance(said, TrajectoryEnd):
            return Answered((), _finite(said.reward), ended=True)
        reward = _finite(said.reward) if isinstance(said, Said) else None
        chat = self._chat(said.messages if isinstance(said, Said) else said)
        wrong = next((m.role for m in chat if m.role not in (USER, TOOL)), None)
        if wrong is not None:
            raise _bad(f"step must say messages of the user or of tools, got one of the {wrong}")
        return Answered(chat, reward, ended=False)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools that the environment declares. Raises EnvironmentFailed."""
        try:
            tools = list(tools_of_environment(self._environment))
            return read_tools(_whole(tools, _Left(self._limits.message_bytes)), "tools")
        except EnvironmentFailed:
            raise
        except Unusable as fault:
            raise _bad(fault.what) from None
        except Exception as error:  # noqa: BLE001  an environment raises what it likes
            raise EnvironmentFailed(ENVIRONMENT_FAILED, f"tools: {_described(error)}") from None

    async def _asked(self, call: Callable[[], Awaitable[Any]], name: str) -> Any:
        async def contained() -> Any:
            try:
                answer = call()
                if not inspect.isawaitable(answer):
                    raise _bad(f"{name} must be async, got {type(answer).__name__}")
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
            raise EnvironmentFailed(ENVIRONMENT_FAILED, f"{name}: {_described(error)}") from None
        finally:
            task.cancel()  # not waited for: it may not end

    def _chat(self, said: Any) -> Chat:
        if not isinstance(said, str | list | tuple) or not said:
            raise _bad(f"it must say a text or messages, got {shown(said, 60)}")
        left = _Left(self._limits.message_bytes)
        found = _whole(said, left)
        value = [{"role": USER, "content": found}] if isinstance(found, str) else found
        try:
            chat = read_chat({_SAYS: value}, _SAYS)
        except Unusable as fault:
            raise _bad(fault.what) from None
        assert not isinstance(chat, str), "a list is read as messages"
        return chat


class _Left:
    """Counts down the bytes of an answer."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, limit

    def take(self, text: str) -> None:
        """Count a text. EnvironmentFailed: there is none left."""
        self.bytes -= len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if self.bytes < 0:
            raise EnvironmentFailed(
                ENVIRONMENT_TOO_LONG, f"an answer must have at most {self.limit} bytes"
            )


def _whole(value: Any, left: _Left, depth: int = 0) -> Any:
    """Return a value of plain types, the halves of characters in its texts replaced or joined."""
    if depth > 32:
        raise _bad("it must say messages of at most 32 levels")
    left.take(value if isinstance(value, str) else " ")
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {
            _whole(str(name), left): _whole(each, left, depth + 1)
            for name, each in value.items()  # pyright: ignore[reportUnknownVariableType]
        }
    if isinstance(value, list | tuple):
        return [_whole(each, left, depth + 1) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _finite(reward: Any) -> float | None:
    if reward is None:
        return None
    if isinstance(reward, bool | int | float) and math.isfinite(reward):
        return float(reward)
    raise _bad(f"a reward must be a finite number, got {shown(reward, 60)}")


def _bad(what: str) -> EnvironmentFailed:
    return EnvironmentFailed(ENVIRONMENT_BAD_REPLY, line(what))


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {line(error)}"
    except Exception:  # noqa: BLE001  an exception of a user's own may raise when it is printed
        return type(error).__name__
