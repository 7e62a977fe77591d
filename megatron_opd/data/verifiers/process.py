"""Holds one worker process from the controller's side.

Invariant: an answer is that of the question just asked; after anything else than a judgement or a
raised exception the process is killed, with all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import psutil

from megatron_opd.config.wording import line
from megatron_opd.data.verifiers.messages import (
    Ask,
    FailedReply,
    Judgement,
    Reply,
    Setup,
    VerifierReady,
    framed,
    read_reply,
)
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.records.drops import VERIFIER_DIED, VERIFIER_TIMED_OUT

STARTUP_S = 120.0
"""Longest time in which a worker imports its verifiers."""
GRACE_S = 0.2
"""How long an answer that has arrived may take to be noticed by a busy controller."""
# Many workers share the machine; a library that starts a thread per core would slow all down.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start_module(module: str, theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start `python -m module`; see start_program."""
    return start_program((sys.executable, "-m", module), theirs)


def start_program(program: Sequence[str], theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start a program, which is given its end of a socket and this process's id.

    It is a session of its own, whose output is discarded. OSError: it cannot be started.
    """
    return subprocess.Popen(
        [*program, str(theirs.fileno()), str(os.getpid())],
        env=_ENVIRONMENT | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
    )


class WorkerProcess:
    """Starts one worker; must be made in the event loop's thread, with which the worker ends.

    OSError: it cannot be started.
    """

    def __init__(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_module("megatron_opd.data.verifiers.worker", theirs)
        self.pid = self._process.pid
        self._opened = asyncio.get_running_loop().create_task(
            self._open(ours, setup), name=f"verifier worker {self.pid}"
        )

    async def _open(
        self, ours: socket.socket, setup: Setup
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(framed(setup))
            async with asyncio.timeout(STARTUP_S):
                reply = await read_reply(reader)
        except (EOFError, OSError, ValueError, TimeoutError) as error:
            writer.close()
            why = f"{type(error).__name__} {line(error)}"
            raise VerifierFailed(VERIFIER_DIED, f"a worker did not start: {why}") from None
        if not isinstance(reply, VerifierReady):
            writer.close()
            why = reply.detail if isinstance(reply, FailedReply) else "it answered a question"
            raise VerifierFailed(VERIFIER_DIED, f"a worker did not start: {why}")
        return reader, writer

    async def ready(self) -> None:
        """Wait until the verifiers are imported. VerifierFailed: they cannot be."""
        await asyncio.shield(self._opened)

    async def ask(self, ask: Ask, timeout_s: float) -> float:
        """Return the reward. VerifierFailed; after VERIFIER_DIED it is of no use."""
        reader, writer = await asyncio.shield(self._opened)
        answered = asyncio.ensure_future(self._answered(reader, writer, ask))
        try:
            await asyncio.wait({answered}, timeout=timeout_s)
            if not answered.done():
                await asyncio.wait({answered}, timeout=GRACE_S)
            if not answered.done():
                raise VerifierFailed(
                    VERIFIER_TIMED_OUT, f"the verifier of {ask.task} took over {timeout_s:g} s"
                )
            reply = answered.result()
        except EOFError:
            raise VerifierFailed(
                VERIFIER_DIED, f"the verifier of {ask.task} ended its process"
            ) from None
        except (OSError, ValueError) as error:
            raise VerifierFailed(
                VERIFIER_DIED, f"the verifier of {ask.task}: {line(error)}"
            ) from None
        finally:
            answered.cancel()
        if isinstance(reply, FailedReply):
            raise VerifierFailed(reply.reason, reply.detail)
        if not isinstance(reply, Judgement):
            raise VerifierFailed(VERIFIER_DIED, f"a worker sent {reply!r} for a judgement")
        return reply.reward

    async def _answered(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ask: Ask
    ) -> Reply:
        writer.write(framed(ask))
        await writer.drain()
        return await read_reply(reader)

    async def end(self) -> None:
        """Kill the process and all that it started, and collect it."""
        self._opened.cancel()
        with contextlib.suppress(asyncio.CancelledError, VerifierFailed):
            _, writer = await self._opened
            writer.close()
        await asyncio.to_thread(kill_tree, self.pid)
        await asyncio.to_thread(self._process.wait)


def kill_tree(pid: int) -> None:
    """Kill a process that is not yet collected, and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        # stopped first: it cannot start another while its children are looked up
        root.suspend()
        for process in (*root.children(recursive=True), root):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
