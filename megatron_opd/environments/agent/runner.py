"""Runs a user's agent, a process for each trajectory, in whatever Python the agent needs.

It is a program of the standard library alone, for Python 3.9 or newer. Invariant: a process has one
trajectory, and is ended with all that it started; none outlives this one, and this one does not
outlive the run. What an agent prints is discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

PACKET_BYTES = 2**17
LENGTH_BYTES = 4
COLLECT_S = 0.5  # how often what has ended is looked for where nothing is asked
MOST_CHARACTERS = 1000
MOST_REWARD = 1e30  # megatron_opd/records/turn_faults.py
FAILED, DIED, BAD_REPLY = "environment_failed", "environment_died", "environment_bad_reply"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
Message = dict[str, Any]
LATE = {
    "openai": ("openai.resources.chat.completions",),
    "httpx": ("certifi", "httpcore"),
}
"""By package what it imports with its first call: 400 of 580 ms of a short agent's CPU time."""


def main(descriptor: int, parent: int) -> None:
    """Answer packets of the socket `descriptor` until process `parent` closes it."""
    end_with(parent)
    control = socket.socket(fileno=descriptor)
    setup = json.loads(control.recv(PACKET_BYTES))
    try:
        function = loaded(setup["kind"])
    except ValueError as error:
        control.send(json.dumps({"type": "HostRefused", "detail": str(error)}).encode())
        return
    control.send(json.dumps({"type": "HostReady", "tools": []}).encode())
    pids: dict[int, int] = {}
    control.settimeout(COLLECT_S)
    while True:
        try:
            body, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, 1)
        except socket.timeout:  # noqa: UP041  no other name for it in Python 3.9
            collect(pids)
            continue
        if not body:
            return
        message = json.loads(body)
        number = message["number"]
        collect(pids)
        if message["type"] == "OpenEnvironment":
            host = os.getpid()
            pids[number] = os.fork()
            if pids[number] == 0:
                control.close()
                become_agent(descriptors[0], host, function, setup)
            os.close(descriptors[0])
        elif number in pids:
            kill_all(pids[number])


def collect(pids: dict[int, int]) -> None:
    """Forget processes that have ended: another may have their ids. Kill what they have left."""
    for number, pid in list(pids.items()):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del pids[number]
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        children = file.read().split()
    for orphan in set(map(int, children)) - set(pids.values()):
        kill_all(orphan)
        os.waitpid(orphan, 0)


def end_with(parent: int) -> None:
    """Let Linux kill this process when process `parent` ends; exit if it has ended already.

    It becomes the parent of those below it that lose theirs.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, has ended")


def loaded(path: str) -> Callable[..., Any]:
    """Return the function MODULE:NAME. ValueError: there is none.

    Modules are looked for where Python looks, then in the working directory; not beside this file.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [*(each for each in sys.path if each != here), os.getcwd()]
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except BaseException as error:  # noqa: BLE001  whatever a user's module raises is told
        raise ValueError(
            f"environment.function: {path} cannot be imported by {sys.executable}: "
            f"{described(error)}; put its directory into PYTHONPATH"
        ) from None
    if not callable(found):
        raise ValueError(f"environment.function: {path} must be an async function")
    import_what_comes_late()
    return found


def import_what_comes_late() -> None:
    """Import what packages that are here import with their first call, once for all agents."""
    for package in LATE.keys() & sys.modules.keys():
        for name in LATE[package]:
            with contextlib.suppress(Exception):  # another version may not have it
                importlib.import_module(name)


def become_agent(
    descriptor: int, host: int, function: Callable[..., Any], setup: Message
) -> NoReturn:
    """Run one trajectory's agent, say what it returned, and wait to be killed."""
    with contextlib.suppress(BaseException):  # it may not return to the host's loop
        end_with(host)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for name in ("NO_PROXY", "no_proxy"):  # no proxy is asked for what is on this machine
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
        connection = socket.socket(fileno=descriptor)
        length = int.from_bytes(received(connection, LENGTH_BYTES), "big")
        task = json.loads(received(connection, length))
        asyncio.run(run_agent(connection, function, task, setup["options"]))
    os._exit(0)


async def run_agent(
    connection: socket.socket, function: Callable[..., Any], task: Message, options: Message
) -> None:
    """Run the agent and send what comes of it, before anything that it leaves behind is ended."""
    try:
        made = function(task["base_url"], task["api_key"], task["row"], **options)
        if not inspect.isawaitable(made):
            found = failed(BAD_REPLY, f"it must be async, and returned {kind_of(made)}")
        else:
            found = returned(await made)
    except MemoryError:
        found = failed(DIED, "it took too much memory")
    except BaseException as error:  # noqa: BLE001  an agent raises what it likes
        found = failed(FAILED, described(error))
    body = json.dumps(found).encode()
    connection.sendall(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    while True:  # what it started is found, and killed, below this process
        signal.pause()


def returned(reward: object) -> Message:
    """Return what is said of an agent that has returned a reward, or something else."""
    if type(reward).__module__ == "numpy" and getattr(reward, "size", 0) == 1:
        reward = reward.item()  # type: ignore[attr-defined]
    if reward is None or (isinstance(reward, (bool, int, float)) and abs(reward) <= MOST_REWARD):
        return {"type": "AgentReturned", "reward": None if reward is None else float(reward)}
    said = f"it must return a finite number of at most 1e30 or None, got {kind_of(reward)}"
    return failed(BAD_REPLY, f"{said} {reward}" if isinstance(reward, float) else said)


def failed(reason: str, detail: str) -> Message:
    """Return what is said of an agent that has failed. reason: as dropped samples are counted."""
    return {"type": "AgentFailed", "reason": reason, "detail": detail}


def described(error: BaseException) -> str:
    """Return an error in words; one of a user's own may raise when it is printed."""
    try:
        return f"{kind_of(error)}: {error}"[:MOST_CHARACTERS]
    except Exception:  # noqa: BLE001  see above
        return kind_of(error)


def kind_of(value: object) -> str:
    """Return the name of a value's type."""
    return type(value).__name__


def received(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes. EOFError: the run is gone."""
    parts = b""
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError("the run has closed the socket")
        parts += part
    return parts


def kill_all(pid: int) -> None:
    """Kill a process that is not yet collected, and all that it started."""
    # stopped first: it cannot start another while its children are looked up
    os.kill(pid, signal.SIGSTOP)
    below = [pid]
    parents = parents_of_all()
    for each in below:
        below += [child for child, parent in parents.items() if parent == each]
    for each in reversed(below):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


def parents_of_all() -> dict[int, int]:
    """Return the parent of each process of this machine."""
    found: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with (
            contextlib.suppress(OSError),  # it has ended meanwhile
            open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file,
        ):
            # behind the name, which may hold anything: state and parent
            found[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
