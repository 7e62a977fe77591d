"""Keeps agents in processes of their own, a trajectory each, in the Python that they need."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from megatron_opd.config.wording import line
from megatron_opd.data.chats import USER, messages_of
from megatron_opd.data.verifiers.messages import decoded, read_body, with_length
from megatron_opd.environments.failed import EnvironmentFailed, failure_told
from megatron_opd.environments.forking import Connection, ForkingHost
from megatron_opd.environments.guarded import EnvironmentLimits
from megatron_opd.environments.protocol import EnvironmentRow
from megatron_opd.environments.wire import HostSetup
from megatron_opd.records.drops import ENVIRONMENT_DIED

RUNNER = Path(__file__).with_name("runner.py")
MOST_BYTES = 2**16
"""Largest size of what a process says: a reward, or an error in a line."""


class AgentReturned(msgspec.Struct, frozen=True, tag=True):
    """Gives the reward that the function returned."""

    reward: float | None


class AgentFailed(msgspec.Struct, frozen=True, tag=True):
    """Says why there is none. reason: one of ENVIRONMENT_REASONS."""

    reason: str
    detail: str


_DECODER: msgspec.json.Decoder[AgentReturned | AgentFailed] = msgspec.json.Decoder(
    AgentReturned | AgentFailed
)


class AgentHost(ForkingHost):
    """Starts processes of one agent, while entered as an async context manager.

    function: MODULE:NAME. arguments: its keyword arguments. interpreter: a Python; None: this one.
    memory_bytes: address space of one process.
    """

    def __init__(
        self,
        function: str,
        arguments: Mapping[str, Any],
        interpreter: str | None,
        limits: EnvironmentLimits,
        memory_bytes: int,
    ) -> None:
        program = (interpreter or sys.executable, str(RUNNER))
        super().__init__(program, HostSetup(function, dict(arguments), limits, memory_bytes))

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[AgentProcess]:
        """Give the process of one trajectory. Raises EnvironmentFailed."""
        async with self.process() as connection:
            yield AgentProcess(connection)


class AgentProcess:
    """Speaks with the process of one trajectory."""

    def __init__(self, connection: Connection) -> None:
        self._reader, self._writer = connection

    async def run(self, base_url: str, api_key: str, row: EnvironmentRow) -> float | None:
        """Let it run; return its reward. Raises EnvironmentFailed."""
        task = {"base_url": base_url, "api_key": api_key, "row": row_of(row)}
        try:
            self._writer.write(with_length(msgspec.json.encode(task)))
            await self._writer.drain()
            said = decoded(_DECODER, await read_body(self._reader, MOST_BYTES, "an agent"))
        except (EOFError, OSError, ValueError) as error:
            what = f"the agent's process ended: {line(error)}"
            raise EnvironmentFailed(ENVIRONMENT_DIED, what) from None
        if isinstance(said, AgentReturned):
            return said.reward
        raise failure_told(said.reason, f"the agent: {said.detail}")


def row_of(row: EnvironmentRow) -> dict[str, Any]:
    """Return a row as an agent gets it: messages and tools as a client sends them."""
    asked = row.prompt
    messages = [{"role": USER, "content": asked}] if isinstance(asked, str) else messages_of(asked)
    return {
        "messages": messages,
        "tools": list(row.tools),
        "answer": row.answer,
        "columns": dict(row.columns),
        "seed": row.seed,
    }
