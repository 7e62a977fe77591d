"""Ends a server at once when its scheduler or detokenizer has died, and says which it was.

SGLang itself notices within a second, and then waits a minute for core dumps of a GPU that need not
be there: until then the server accepts requests that nobody answers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from sglang_bridge.server import files

POLL_S = 0.25
TITLE = "sglang::"  # what SGLang's workers call themselves
EXIT_WORKER_DIED = 70
KILLED_S = 1.0
"""Longest wait in seconds for a killed process to end, which the system may free slowly."""
ENDED_WELL = "ended with exit code 0"


def end_with_workers(own_files: str, *, owned: bool = True, poll_s: float = POLL_S) -> None:
    """Watches this process's workers from a thread; ends the process once one of them died.

    owned: whoever started this process reads the obituary in `own_files` and removes them.
    """

    def watch() -> None:
        names: dict[int, str] = {}
        handles: dict[int | None, BaseProcess] = {}
        while True:
            handles |= {child.pid: child for child in multiprocessing.active_children()}
            names = titled_children() | names  # the title of a dead one is cut short
            for pid, name in list(names.items()):
                cause = cause_of_death(pid, handles.get(pid))
                if cause == ENDED_WELL:
                    del names[pid]  # SGLang waits for the others to free their devices
                elif cause is not None:
                    end(f"{name} (pid {pid}) {cause}", own_files, owned)
            time.sleep(poll_s)

    threading.Thread(target=watch, name="end-with-workers", daemon=True).start()


def titled_children() -> dict[int, str]:
    """Returns {pid: title} of this process's children that are SGLang's workers."""
    found = {}
    for child in psutil.Process().children():
        try:
            name = child.name()
        except psutil.NoSuchProcess:
            continue
        if name.startswith(TITLE):
            found[child.pid] = name.removeprefix(TITLE)
    return found


def cause_of_death(pid: int, handle: BaseProcess | None = None) -> str | None:
    """Returns how a child ended, in words; None while it runs. Its parent still collects it.

    handle: the process as multiprocessing knows it. SGLang looks after its workers as well and may
    have collected this one already; only the handle then still knows how it ended.
    """
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        code = None if handle is None else handle.exitcode
        return "is gone" if code is None else _ending(code)
    if status is None:
        return None
    code = status.si_status
    return _ending(code if status.si_code == os.CLD_EXITED else -code)


def _ending(code: int) -> str:
    """Describes an exit code in words; negative for a signal, as multiprocessing has it."""
    return f"ended with exit code {code}" if code >= 0 else f"ended with signal {-code}"


def end(cause: str, own_files: str, owned: bool) -> None:
    """Ends this process and everything below it."""
    files.write_obituary(own_files, cause)
    sys.stderr.write(f"sglang_bridge: {cause}: this server ends\n")
    sys.stderr.flush()
    pids = kill_below()
    if owned:
        files.remove_shared_memory(own_files, pids)
    else:
        files.remove(own_files, pids)
    os._exit(EXIT_WORKER_DIED)


def kill_below() -> list[int]:
    """Kills every process below this one, waits for their end and returns their ids."""
    below = psutil.Process().children(recursive=True)
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(below, timeout=KILLED_S)
    return [process.pid for process in below]


def descendants(pid: int) -> list[int]:
    """Lists process ids below `pid`, itself included."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def process_group(group: int) -> list[int]:
    """Lists ids of the processes of a process group, zombies included (Linux /proc)."""
    return [pid for pid, state in group_states(group)]


def group_states(group: int) -> list[tuple[int, str]]:
    """Lists (process id, scheduler state letter) of every process of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the command, which may hold spaces: state, ppid, pgrp, ...
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if int(fields[2]) == group:
            found.append((int(entry.name), fields[0]))
    return found
