"""Starts `opd` in processes of its own, waits for their end, and ends what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPD = "megatron_opd"
END_S = 60.0
"""Longest wait in seconds for a process that was asked to end."""


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
        raise RuntimeError(f"{name} ended with {code}: see {log}")
