"""Imports an environment once, and forks a process of its own for each trajectory (Linux).

Invariant: a process has one trajectory's environment and ends with its socket; none outlives the
host, and the host does not outlive the run. What it or an environment prints is discarded. The host
has one thread, so that a forked process has whatever was imported, and no lock that is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from megatron_opd.config.wording import line
from megatron_opd.data.chats import tools_of
from megatron_opd.data.verifiers.process import kill_tree
from megatron_opd.data.verifiers.worker import end_with_parent
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.guarded import GuardedEnvironment
from megatron_opd.environments.protocol import make_environment
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
    StepSaid,
    framed,
    packet,
    read_ask,
    unpacked,
)
from megatron_opd.records.drops import ENVIRONMENT_BAD_REPLY
from sglang_bridge.lifetime import adopt_orphans

COLLECT_S = 0.5
"""How often what has ended is looked for where nothing is asked."""


def main(descriptor: int, parent: int) -> None:
    """Answer packets of the socket `descriptor` until process `parent` closes it."""
    end_with_parent(parent)
    adopt_orphans()  # of environments that have ended before what they started
    control = socket.socket(fileno=descriptor)
    setup = unpacked(control.recv(PACKET_BYTES))
    assert isinstance(setup, HostSetup), "the first message names the environment"
    try:
        made = GuardedEnvironment(make_environment(setup.kind, setup.options), setup.limits)
        ready = packet(HostReady(made.tools()))
    except (ValueError, EnvironmentFailed) as error:
        control.send(packet(HostRefused(line(error))))
        return
    control.send(ready)
    pids: dict[int, int] = {}
    control.settimeout(COLLECT_S)
    while True:
        try:
            body, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, 1)
        except TimeoutError:
            _collect(pids)
            continue
        if not body:
            return
        message = unpacked(body)
        _collect(pids)
        if isinstance(message, OpenEnvironment):
            host = os.getpid()
            pid = os.fork()
            if pid == 0:
                control.close()
                _become_environment(descriptors[0], host, setup)
            os.close(descriptors[0])
            pids[message.number] = pid
        elif isinstance(message, EndEnvironment) and message.number in pids:
            kill_tree(pids[message.number])


def _collect(pids: dict[int, int]) -> None:
    """Forget processes that have ended: from now on another may have their ids.

    What they have left is killed.
    """
    for number, pid in list(pids.items()):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del pids[number]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    for orphan in set(map(int, children.split())) - set(pids.values()):
        kill_tree(orphan)
        os.waitpid(orphan, 0)


def _become_environment(descriptor: int, host: int, setup: HostSetup) -> NoReturn:
    """Answer the questions of one trajectory, then exit."""
    with contextlib.suppress(BaseException):  # it may not return to the host's loop
        end_with_parent(host)
        adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        asyncio.run(_answer_all(socket.socket(fileno=descriptor), setup))
    os._exit(0)


async def _answer_all(connection: socket.socket, setup: HostSetup) -> None:
    environment = make_environment(setup.kind, setup.options)
    guarded = GuardedEnvironment(environment, setup.limits)
    reader, writer = await asyncio.open_connection(sock=connection)
    while True:
        writer.write(await answer(guarded, await read_ask(reader)))
        await writer.drain()


async def answer(guarded: GuardedEnvironment, ask: Ask) -> bytes:
    """Return what goes back to a question, as it goes through the socket."""
    try:
        return framed(await _answer(guarded, ask))
    except (TypeError, ValueError, OverflowError) as error:  # a number that msgpack does not have
        return framed(AnswerFailed(ENVIRONMENT_BAD_REPLY, line(error)))


async def _answer(guarded: GuardedEnvironment, ask: Ask) -> HostAnswer:
    try:
        if isinstance(ask, StartAsk):
            chat = await guarded.start(ask.row)
            return StartSaid(chat, tools_of(chat))
        return StepSaid(await guarded.step(ask.reply))
    except EnvironmentFailed as failed:
        return AnswerFailed(failed.reason, line(failed.detail))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
