"""Forks servers for tests, and starts programs that have servers forked for them too.

    python -m tests.support.preloaded

It does what sglang_bridge.server.preloaded does, and runs code (`python -c CODE`) in a fork. Any
other command becomes a program of its own, by exec, which has a fork of this process below it: the
servers that it starts need to import nothing.
"""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_bridge.imports import keep_out
from sglang_bridge.server import entry, forks
from sglang_bridge.server.preloaded import ORDERS, STREAMS, Imported, run_server, serve
from sglang_bridge.server.spec import PRELOADED_VARIABLE


def is_server(command: Sequence[str]) -> bool:
    return list(command[1:3]) == ["-m", entry.MODULE]


class Programs(Imported):
    """Lets programs have any environment: those of the servers that they start are looked at."""

    def refusal(self, order: Mapping[str, Any]) -> str | None:
        return super().refusal(order) if is_server(order["command"]) else None

    def become(self, order: Mapping[str, Any], streams: Sequence[int]) -> None:
        super().become(order, streams)
        if not is_server(order["command"]):
            os.environ.clear()
            os.environ.update(order["env"])


def act(command: list[str]) -> None:
    if is_server(command):
        run_server(command)
        return
    if command[1] == "-c":
        exec(command[2], {"__name__": "__main__"})  # its functions see what it defines
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        os.set_inheritable(ours.fileno(), True)
        os.environ[PRELOADED_VARIABLE] = f"{os.getpid()}:{ours.fileno()}"
        os.execv(command[0], command)
    ours.close()
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in STREAMS:
        os.dup2(nothing, stream)
    serve(theirs, Imported(imported.before, imported.changed), run_server)


class Program(subprocess.Popen[Any]):
    """A program in a session of its own, started by the preloaded process where there is one."""

    def _execute_child(
        self, args: Sequence[str], executable: Any, preexec_fn: Any, *more: Any
    ) -> None:
        env, pipes = more[3], more[7:13]
        below = forks.preloaded()
        given = zip((pipes[0], pipes[3], pipes[5]), STREAMS, strict=True)
        streams = [own if pipe == -1 else pipe for pipe, own in given]
        env = os.environ if env is None else env
        forked = None if below is None else below.fork(args, env, streams)
        if forked is None:
            super()._execute_child(args, executable, preexec_fn, *more)
            return
        self.pid, self._child_created = forked.pid, True
        self._close_pipe_fds(*pipes)


if __name__ == "__main__":
    keep_out(*entry.NEVER_IMPORTED)
    imported = Programs.by(entry.preload)
    serve(socket.socket(fileno=ORDERS), imported, act)
