"""Keeps environments in processes of their own, a trajectory each, with limits on time and memory.

Invariant: whatever an environment does to its process, its own trajectory alone is lost, and after
its trajectory nothing is left of it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from megatron_opd.config.wording import line
from megatron_opd.data.chats import Chat, RowChat
from megatron_opd.data.verifiers.process import kill_tree, start_module
from megatron_opd.environments.calls import Reply
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.guarded import Answered, EnvironmentLimits, Partner
from megatron_opd.environments.protocol import EnvironmentRow
from megatron_opd.environments.wire import (
    PACKET_BYTES,
    AnswerFailed,
    Ask,
    EndEnvironment,
    HostAnswer,
    HostReady,
    HostRefused,
    HostSetup,
    OpenEnvironment,
    StartAsk,
    StartSaid,
    StepAsk,
    StepSaid,
    framed,
    packet,
    read_said,
    unpacked,
)
from megatron_opd.records.drops import ENVIRONMENT_DIED, ENVIRONMENT_TIMED_OUT

STARTUP_S = 120.0
"""Longest time in which a host imports its environment."""
SEND_S = 60.0
"""Longest time in which a host takes a packet: it does nothing but fork and kill."""
GRACE_S = 1.0
"""How much longer than its limit an answer may take to arrive from a busy machine."""


class EnvironmentHost:
    """Starts processes of one environment, while entered as an async context manager.

    kind, options: see make_environment. memory_bytes: address space of one process. tools: what it
    declares, once it is entered. Entering raises ValueError where the environment cannot be made,
    OSError where the host cannot be started.
    """

    def __init__(
        self, kind: str, options: Mapping[str, Any], limits: EnvironmentLimits, memory_bytes: int
    ) -> None:
        self._setup = HostSetup(kind, dict(options), limits, memory_bytes)
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._numbers = count()
        self._hosts: list[_HostProcess] = []  # the last one runs
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> EnvironmentHost:
        """Start the host and wait until its environment can be made."""
        try:
            await self._running()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        """End the host, and with it the processes of its environments."""
        for host in self._hosts:
            await asyncio.to_thread(host.end)

    @asynccontextmanager
    async def environment(self) -> AsyncIterator[Partner]:
        """Give one trajectory's environment. Raises EnvironmentFailed."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                host = await self._running()
                await asyncio.to_thread(host.send, OpenEnvironment(number), theirs)
                theirs.close()
                reader, writer = await asyncio.open_connection(sock=ours)
            except (OSError, ValueError) as error:
                what = f"no process can be started: {line(error)}"
                raise EnvironmentFailed(ENVIRONMENT_DIED, what) from None
            try:
                yield _HostedEnvironment(reader, writer, self._setup.limits)
            finally:
                writer.transport.abort()  # without waiting for what is not sent yet
                await asyncio.to_thread(host.end_environment, number)

    async def _running(self) -> _HostProcess:
        """Return the host's process, another one where it has ended."""
        async with self._starting:
            if not self._hosts or self._hosts[-1].has_ended:
                # in this thread: the process ends with the thread that starts it
                self._hosts.append(_HostProcess())
                self.tools = await asyncio.to_thread(self._hosts[-1].set_up, self._setup)
            return self._hosts[-1]


class _HostProcess:
    """Starts the process of a host. OSError: it cannot be started."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_module("megatron_opd.environments.host", theirs)

    def set_up(self, setup: HostSetup) -> Sequence[Mapping[str, Any]]:
        """Name its environment, and return its tools. ValueError: it cannot be made."""
        self._control.settimeout(STARTUP_S)
        try:
            self._control.send(packet(setup))
            reply = unpacked(self._control.recv(PACKET_BYTES))
        except OSError as error:
            self.end()
            raise ValueError(f"environment: its host did not start: {line(error)}") from None
        except ValueError:
            self.end()
            raise
        if not isinstance(reply, HostReady):
            self.end()
            raise ValueError(reply.detail if isinstance(reply, HostRefused) else str(reply))
        self._control.settimeout(SEND_S)
        return reply.tools

    @property
    def has_ended(self) -> bool:
        """Returns whether the process is gone."""
        return self._process.poll() is not None

    def send(self, message: OpenEnvironment, connection: socket.socket) -> None:
        """Let a process start that speaks through `connection`. OSError: it does not."""
        socket.send_fds(self._control, [packet(message)], [connection.fileno()])

    def end_environment(self, number: int) -> None:
        """Let a process be killed, if there still is one."""
        try:
            self._control.send(packet(EndEnvironment(number)))
        except OSError:
            return  # the host is gone, and its processes with it

    def end(self) -> None:
        """Kill the process, with all that it started, and collect it."""
        self._control.close()
        if not self.has_ended:
            kill_tree(self._process.pid)
            self._process.wait()


class _HostedEnvironment:
    """Asks an environment's process; see Partner."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: EnvironmentLimits,
    ) -> None:
        self._reader, self._writer, self._limits = reader, writer, limits

    async def start(self, row: EnvironmentRow) -> Chat:
        """Return the conversation's beginning."""
        said = await self._asked(StartAsk(row))
        if not isinstance(said, StartSaid):
            raise EnvironmentFailed(ENVIRONMENT_DIED, "its process answered another question")
        return RowChat.of(said.messages, said.tools)

    async def step(self, reply: Reply) -> Answered:
        """Return what is answered to a turn."""
        said = await self._asked(StepAsk(reply))
        if not isinstance(said, StepSaid):
            raise EnvironmentFailed(ENVIRONMENT_DIED, "its process answered another question")
        return said.answered

    async def _asked(self, ask: Ask) -> HostAnswer:
        limit_s = self._limits.timeout_s
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                self._writer.write(framed(ask))
                await self._writer.drain()
                # msgpack and escapes take more room than the texts
                said = await read_said(self._reader, 2 * self._limits.message_bytes + 2**20)
        except TimeoutError:
            raise EnvironmentFailed(ENVIRONMENT_TIMED_OUT, f"it took over {limit_s:g} s") from None
        except (EOFError, OSError, ValueError) as error:
            what = f"its process ended: {line(error)}"
            raise EnvironmentFailed(ENVIRONMENT_DIED, what) from None
        if isinstance(said, AnswerFailed):
            raise EnvironmentFailed(said.reason, said.detail)
        return said
