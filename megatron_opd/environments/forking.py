"""Keeps a host process, which forks one for each trajectory: see host.py and agent/runner.py.

Invariant: after its trajectory nothing is left of a process, and none outlives the host.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Self

from megatron_opd.config.wording import line
from megatron_opd.data.verifiers.process import kill_tree, start_program
from megatron_opd.environments.failed import EnvironmentFailed, HostLost
from megatron_opd.environments.wire import (
    PACKET_BYTES,
    EndEnvironment,
    HostReady,
    HostRefused,
    HostSetup,
    OpenEnvironment,
    packet,
    unpacked,
)
from megatron_opd.records.drops import ENVIRONMENT_DIED

STARTUP_S = 120.0
"""Longest time in which a host imports its environment."""
SEND_S = 60.0
"""Longest time in which a host takes a packet: it does nothing but fork and kill."""

COLLECTED_S, POLL_S = 0.5, 0.05
"""How long a host is looked for whose process of a trajectory has ended, and how often."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ForkingHost:
    """Keeps a host while entered as an async context manager.

    program: the host, which is given its end of a socket and this process's id. tools: what its
    environment declares, once it is entered. Entering raises ValueError where the environment
    cannot be made, OSError where the host cannot be started.
    """

    def __init__(self, program: Sequence[str], setup: HostSetup) -> None:
        self._program, self._setup = tuple(program), setup
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._numbers = count()
        self._hosts: list[_HostProcess] = []  # the last one runs
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Start the host and wait until its environment can be made."""
        try:
            await self._running()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        """End the host, and with it the processes that it has forked."""
        for host in self._hosts:
            await asyncio.to_thread(host.end)

    @asynccontextmanager
    async def process(self) -> AsyncIterator[Connection]:
        """Give the connection of a process of one trajectory.

        Raises EnvironmentFailed; HostLost: its process ended, or never began, with its host.
        """
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                host = await self._running()
            except (OSError, ValueError) as error:
                raise _not_started(EnvironmentFailed, error) from None
            try:
                await asyncio.to_thread(host.send, OpenEnvironment(number), theirs)
                theirs.close()
                reader, writer = await asyncio.open_connection(sock=ours)
            except OSError as error:
                kind = HostLost if await host.is_lost() else EnvironmentFailed
                raise _not_started(kind, error) from None
            try:
                yield reader, writer
            except EnvironmentFailed as failed:
                if failed.reason != ENVIRONMENT_DIED or not await host.is_lost():
                    raise
                raise HostLost(failed.reason, failed.detail) from None
            finally:
                writer.transport.abort()  # without waiting for what is not sent yet
                await asyncio.to_thread(host.end_environment, number)

    async def _running(self) -> _HostProcess:
        """Return the host's process, another one where it has ended."""
        async with self._starting:
            if not self._hosts or self._hosts[-1].has_ended:
                # in this thread: the process ends with the thread that starts it
                self._hosts.append(_HostProcess(self._program))
                self.tools = await asyncio.to_thread(self._hosts[-1].set_up, self._setup)
            return self._hosts[-1]


def _not_started(kind: type[EnvironmentFailed], error: Exception) -> EnvironmentFailed:
    return kind(ENVIRONMENT_DIED, f"no process can be started: {line(error)}")


class _HostProcess:
    """Starts the process of a host. OSError: it cannot be started."""

    def __init__(self, program: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_program(program, theirs)

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

    async def is_lost(self) -> bool:
        """Return whether the process is gone; it may be seen a moment after those it has forked."""
        waited_s = 0.0
        while not self.has_ended and waited_s < COLLECTED_S:
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
        return self.has_ended

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
