"""Imports what a server runs, once, and forks servers: `python -m sglang_bridge.server.preloaded`.

Standard input is a socket of whoever starts servers (forks.py). An order is JSON {command, env,
directory} with descriptors of the fork's standard input, output and error; the answer is JSON
{pid}, or {refused} with a reason. This process ends when the socket does.

Invariants: it has one thread, or it forks nothing. A fork is no child of this process, which forks
twice: it is its orderer's, which adopts orphans meanwhile, so it may outlive this process, and
getppid, waitpid and signals at the end of the parent are what they are for a process that was
spawned. It begins only once that is so. What imports read of the environment is what they would
have read in the fork.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import setproctitle

from sglang_bridge.imports import keep_out
from sglang_bridge.server import entry
from sglang_bridge.server.spec import READ_LATE

ORDERS = 0
MOST_BYTES = 1 << 20
STREAMS = (0, 1, 2)
READ_BY_NOBODY = frozenset({"_", "COLUMNS", "LINES", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST"})
"""Variables that shells and tests set, and no import reads."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Says what the environment was when servers' modules were imported, and what they changed.

    changed: None: removed.
    """

    before: Mapping[str, str]
    changed: Mapping[str, str | None]

    @classmethod
    def by(cls, preload: Callable[[], object]) -> Self:
        """Imports, for forks to come."""
        setproctitle.getproctitle()  # it finds its place by the environment as it was
        before = dict(os.environ)
        preload()
        gc.collect()
        gc.freeze()  # a collection in a fork would write to, and so copy, all that was imported
        names = before.keys() | os.environ.keys()
        after = {name: os.environ.get(name) for name in names}
        return cls(before, {name: after[name] for name in names if after[name] != before.get(name)})

    def refusal(self, order: Mapping[str, Any]) -> str | None:
        """Returns why what is ordered is not to be forked; None: it may be."""
        if (found := len(os.listdir("/proc/self/task"))) > 1:
            return f"it has {found} threads"
        env = order["env"]
        names = (self.before.keys() | env.keys()) - READ_LATE - READ_BY_NOBODY
        others = sorted(name for name in names if self.before.get(name) != env.get(name))
        return f"imports have read other values of {', '.join(others)}" if others else None

    def become(self, order: Mapping[str, Any], streams: Sequence[int]) -> None:
        """Makes a fork the process that was ordered: its streams, name and environment."""
        os.chdir(order["directory"])
        for stream, given in zip(STREAMS, streams, strict=True):
            os.dup2(given, stream)
            os.close(given)
        setproctitle.setproctitle(" ".join(order["command"]))
        setproctitle.setthreadtitle(Path(order["command"][0]).name)
        os.environ.clear()
        os.environ.update(order["env"])
        for name, value in self.changed.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # what each process draws for itself when it starts
        multiprocessing.current_process().authkey = os.urandom(32)
        random.seed()
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()


def serve(orders: socket.socket, imported: Imported, act: Callable[[list[str]], object]) -> None:
    """Forks on orders, and ends this process with them; returns in a fork, once it has acted."""
    while True:
        message, streams, _, _ = socket.recv_fds(orders, MOST_BYTES, len(STREAMS))
        if not message:
            os._exit(0)  # clearing up after all that was imported takes a second
        order = json.loads(message)
        refused = imported.refusal(order)
        if refused is None:
            pid, begin = fork_twice()
            if pid is None:
                orders.close()
                imported.become(order, streams)
                act(order["command"])
                return
            orders.send(json.dumps({"pid": pid}).encode())
            begin()
        else:
            orders.send(json.dumps({"refused": refused}).encode())
        for stream in streams:
            os.close(stream)


def fork_twice() -> tuple[int | None, Callable[[], None]]:
    """Forks a process whose parent is the nearest above this one that adopts orphans.

    It leads a session of its own. Returns its id, and what lets it begin; in it None, once it may
    begin. It ends if this process ends before.
    """
    told, tell = os.pipe()
    waits, go = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork() != 0:
            os._exit(0)
        os.setsid()  # before anybody has its id, and with it signals the session's group
        os.write(tell, str(os.getpid()).encode())
        os.close(go)
        if not os.read(waits, 1):
            os._exit(1)
        for end in (told, tell, waits):
            os.close(end)
        return None, lambda: None
    os.waitpid(between, 0)  # what it leaves has been adopted by then
    os.close(tell)
    pid = int(os.read(told, 32))
    for end in (told, waits):
        os.close(end)

    def begin() -> None:
        os.write(go, b"1")
        os.close(go)

    return pid, begin


def run_server(command: list[str]) -> None:
    """Does what a server's command line does."""
    sys.argv = [
        str(Path(entry.__file__).with_name("__main__.py")),
        *command[command.index(entry.MODULE) + 1 :],
    ]
    entry.main()


if __name__ == "__main__":
    keep_out(*entry.NEVER_IMPORTED)
    serve(socket.socket(fileno=ORDERS), Imported.by(entry.preload), run_server)
