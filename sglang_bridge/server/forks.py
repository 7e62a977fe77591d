"""Starts servers as forks of a process that has imported SGLang: 1 s of processor time, not 9.

Where nothing was preloaded, or a fork would not be what a spawned process is (preloaded.py), a
server is spawned.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from sglang_bridge.lifetime import adopting_orphans
from sglang_bridge.server.spec import PRELOADED_VARIABLE

logger = logging.getLogger(__name__)

PROGRAM = "sglang_bridge.server.preloaded"
MOST_ANSWER = 1 << 16
_below: Preloaded | None = None


class ServerChild(Protocol):
    """Represents a child of this process, spawned (subprocess.Popen) or forked."""

    @property
    def pid(self) -> int:
        """Returns its id."""
        ...

    def poll(self) -> int | None:
        """Returns its exit code, negative for a signal; None while it runs."""
        ...

    def wait(self) -> int:
        """Returns its exit code once it has ended."""
        ...


class Forked:
    """Represents a child that another process forked for this one. Thread-safe."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Returns its exit code, negative for a signal; None while it runs."""
        with self._lock:
            if self._code is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
                self._code = os.waitstatus_to_exitcode(ended[1])
            return self._code

    def wait(self) -> int:
        """Returns its exit code once it has ended."""
        while (code := self.poll()) is None:
            with contextlib.suppress(ChildProcessError):  # another thread has just collected it
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return code


class Preloaded:
    """Lets a preloaded process below this one fork, and ends it. Thread-safe.

    orders: the socket that it reads. process: it, where this process started it.
    """

    def __init__(
        self, orders: socket.socket, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.process, self._orders, self._lock = process, orders, threading.Lock()

    def close(self) -> None:
        """Ends it; what it forked runs on."""
        self._orders.close()
        if self.process is not None:
            self.process.wait()

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], streams: Sequence[int]
    ) -> Forked | None:
        """Returns what runs a server's command; None: it is to be spawned.

        streams: descriptors of its standard input, output and error.
        """
        order = {"command": list(command), "env": dict(env), "directory": os.getcwd()}
        try:
            with self._lock, adopting_orphans():
                socket.send_fds(self._orders, [json.dumps(order).encode()], list(streams))
                answer: dict[str, Any] = json.loads(self._orders.recv(MOST_ANSWER))
        except (OSError, ValueError) as error:  # what has ended answers with an empty message
            answer = {"refused": f"the preloaded process has ended ({error})"}
        if "refused" in answer:
            logger.warning("a server is spawned and not forked: %s", answer["refused"])
            return None
        return Forked(answer["pid"])


def preload(env: Mapping[str, str], program: str = PROGRAM) -> Preloaded:
    """Starts a process that imports what servers run: those that are started here are its forks.

    env: that of servers (spec.py). It ends with this process.
    """
    global _below
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", program],
            env=env,
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    _below = Preloaded(ours, process)
    return _below


def preloaded() -> Preloaded | None:
    """Returns the preloaded process below this one, if there is one."""
    global _below
    owner, _, descriptor = os.environ.pop(PRELOADED_VARIABLE, "").partition(":")
    if owner == str(os.getpid()):  # not that of a process above this one
        os.set_inheritable(int(descriptor), False)
        _below = Preloaded(socket.socket(fileno=int(descriptor)))
    return _below


def start_server(command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> ServerChild:
    """Starts a server's command with its output in `log`, in a session of its own."""
    if (below := preloaded()) is not None:
        with open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), log.fileno(), log.fileno()]
            if (forked := below.fork(command, env, streams)) is not None:
                return forked
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
