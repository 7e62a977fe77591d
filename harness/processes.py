"""Starts `opd` in processes of its own, waits for their end, and ends what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

OPD = "megatron_opd"
Given, Found = TypeVar("Given"), TypeVar("Found")
SHOWN = 2000
"""Last characters of the log of a process that failed."""
END_S = 60.0
"""Longest wait in seconds for a process that was asked to end."""


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, user and system."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def mapped(
    function: Callable[[Given], Found], each: Sequence[Given], jobs: int, chunk: int
) -> Iterator[Found]:
    """What a function makes of each, in order, by so many processes; 1: by this one."""
    if jobs == 1:
        yield from map(function, each)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(function, each, chunksize=chunk)


@contextmanager
def started(log: Path, *words: str, module: str = OPD) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m MODULE WORDS`; at the end of the block it is ended, killed if it must be."""
    command = [sys.executable, "-m", module, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ended(name: str, process: subprocess.Popen[bytes], log: Path, limit_s: float) -> None:
    """Wait until it has ended. RuntimeError: it failed. subprocess.TimeoutExpired."""
    if (code := process.wait(limit_s)) != 0:
        said = log.read_text(encoding="utf-8", errors="replace")[-SHOWN:]
        raise RuntimeError(f"{name} ended with {code}:\n{said}")
