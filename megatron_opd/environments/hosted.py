"""Keeps environments in processes of their own, a trajectory each, with limits on time and memory.

Invariant: whatever an environment does to its process, its own trajectory alone is lost, and after
its trajectory nothing is left of it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from megatron_opd.config.wording import line
from megatron_opd.data.chats import Chat, ChatMessage, messages_of
from megatron_opd.environments.calls import Reply
from megatron_opd.environments.failed import EnvironmentFailed, failure_told
from megatron_opd.environments.forking import ForkingHost
from megatron_opd.environments.guarded import EnvironmentLimits, Partner
from megatron_opd.environments.play import Played, Player, TurnSampler
from megatron_opd.environments.protocol import EnvironmentRow, Said, TrajectoryEnd
from megatron_opd.environments.wire import (
    AnswerFailed,
    Ask,
    HostAnswer,
    HostSetup,
    StartAsk,
    StartSaid,
    StepAsk,
    StepSaid,
    framed,
    read_said,
)
from megatron_opd.environments.words import Answered, read_answer, read_beginning, read_declared
from megatron_opd.records.drops import ENVIRONMENT_DIED, ENVIRONMENT_TIMED_OUT

GRACE_S = 1.0
"""How much longer than its limit an answer may take to arrive from a busy machine."""


class EnvironmentHost(ForkingHost):
    """Starts processes of one environment, while entered as an async context manager.

    kind, options: see make_environment. memory_bytes: address space of one process.
    """

    def __init__(
        self, kind: str, options: Mapping[str, Any], limits: EnvironmentLimits, memory_bytes: int
    ) -> None:
        program = (sys.executable, "-m", "megatron_opd.environments.host")
        super().__init__(program, HostSetup(kind, dict(options), limits, memory_bytes))
        self._limits = limits

    @asynccontextmanager
    async def environment(self) -> AsyncIterator[Partner]:
        """Give one trajectory's environment. Raises EnvironmentFailed."""
        async with self.process() as (reader, writer):
            yield _HostedEnvironment(reader, writer, self._limits)


@dataclass(frozen=True, slots=True)
class HostedPlaying:
    """Runs trajectories with environments in processes of their own.

    host: starts them, and has been entered. player: runs a trajectory with one.
    """

    host: EnvironmentHost
    player: Player

    async def play(self, row: EnvironmentRow, sample: TurnSampler) -> Played:
        """Run one trajectory; see Playing."""
        async with self.host.environment() as partner:
            return await self.player.play(partner, row, sample)


class _HostedEnvironment:
    """Asks an environment's process; see Partner.

    What arrives is read as if the environment had said it here: its code may write anything.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: EnvironmentLimits,
    ) -> None:
        self._reader, self._writer, self._limits = reader, writer, limits
        # msgpack, escapes and names of fields take more room than the texts
        self._most_bytes = 2 * limits.message_bytes + 2**20

    async def start(self, row: EnvironmentRow) -> Chat:
        """Return the conversation's beginning."""
        said = await self._asked(StartAsk(row))
        if not isinstance(said, StartSaid):
            raise EnvironmentFailed(ENVIRONMENT_DIED, "its process answered another question")
        tools = read_declared(list(said.tools), self._most_bytes)
        return read_beginning(_as_said(said.messages), tools, self._most_bytes)

    async def step(self, reply: Reply) -> Answered:
        """Return what is answered to a turn."""
        said = await self._asked(StepAsk(reply))
        if not isinstance(said, StepSaid):
            raise EnvironmentFailed(ENVIRONMENT_DIED, "its process answered another question")
        found = said.answered
        if found.ended:
            return read_answer(TrajectoryEnd(found.reward), self._most_bytes)
        return read_answer(Said(_as_said(found.messages), found.reward), self._most_bytes)

    async def _asked(self, ask: Ask) -> HostAnswer:
        limit_s = self._limits.timeout_s
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                self._writer.write(framed(ask))
                await self._writer.drain()
                said = await read_said(self._reader, self._most_bytes)
        except TimeoutError:
            raise EnvironmentFailed(ENVIRONMENT_TIMED_OUT, f"it took over {limit_s:g} s") from None
        except (EOFError, OSError, ValueError) as error:
            what = f"its process ended: {line(error)}"
            raise EnvironmentFailed(ENVIRONMENT_DIED, what) from None
        if isinstance(said, AnswerFailed):
            raise failure_told(said.reason, said.detail)
        return said


def _as_said(chat: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return list(messages_of(tuple(chat)))
