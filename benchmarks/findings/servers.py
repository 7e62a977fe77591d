"""A student's and a teacher's server that stay up while many runs use them in turn.

A run of a study takes 20 to 60 s, and two servers take as much processor time to start. So they are
started once, by `opd serve`, and before each run the student's goes back to its checkpoint and
version 0 (`ServerClient.rewind`). With `run.deterministic` a run ends with the same bytes as with
servers of its own (tests/e2e/test_findings.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError
from sglang_bridge.server.launch import last_lines

ROLES = ("student", "teacher")
START_S, REQUEST_S, END_S = 300.0, 60.0, 20.0
LOOK_AGAIN_S = 0.5


@dataclass(frozen=True)
class Pair:
    """One student's and one teacher's server. urls: by role."""

    urls: Mapping[str, str]

    @property
    def overrides(self) -> dict[str, str]:
        """What a run is told, so that it uses these servers."""
        return {f"{role}.urls": f'["{url}"]' for role, url in self.urls.items()}

    def rewind(self) -> None:
        """Give the student's server its first weights and version 0 again."""
        asyncio.run(_rewind(self.urls["student"]))


async def _rewind(url: str) -> None:
    client = ServerClient(url, timeout_s=REQUEST_S)
    try:
        await client.rewind()
    finally:
        await client.close()


@contextmanager
def serving(config: Path, logs: Path, ports: tuple[int, int]) -> Iterator[Pair]:
    """Start both servers of `config` on two ports, the student's first.

    No process of theirs is left at the end. RuntimeError: one did not start, with the end of its
    log.
    """
    logs.mkdir(parents=True, exist_ok=True)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    urls: dict[str, str] = {}
    try:
        for port, role in zip(ports, ROLES, strict=True):
            command = [sys.executable, "-m", "megatron_opd", "serve", role, str(config)]
            command += ["--set", f"{role}.base_port={port}"]
            with (logs / f"{role}-{port}.log").open("wb") as output:
                processes[role] = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            urls[role] = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        for role, url in urls.items():
            port = url.rsplit(":", 1)[1]
            _await(url, processes[role], logs / f"{role}-{port}.log", deadline)
        yield Pair(urls)
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        for process in processes.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await(url: str, process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    while not asyncio.run(_answers(url)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{url} did not start:\n{last_lines(log)}")
        time.sleep(LOOK_AGAIN_S)


async def _answers(url: str) -> bool:
    client = ServerClient(url, timeout_s=REQUEST_S)
    try:
        await client.info()
    except BridgeError:
        return False
    finally:
        await client.close()
    return True
