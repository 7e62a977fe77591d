"""A student's and a teacher's server that stay up while many runs use them in turn.

A run of a study takes 20 to 60 s, and two servers take as much processor time to start. So they are
started once, by `opd serve`, and before each run the student's goes back to its checkpoint and
version 0 (`ServerClient.rewind`). With `run.deterministic` a run ends with the same bytes as with
servers of its own (tests/e2e/test_findings.py).
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.processes import started
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError
from sglang_bridge.server.launch import last_lines

ROLES = ("student", "teacher")
START_S, REQUEST_S = 300.0, 60.0
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
    with ExitStack() as stack:
        deadline = time.monotonic() + START_S
        begun: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        for port, role in zip(ports, ROLES, strict=True):
            log = logs / f"{role}-{port}.log"
            words = ("serve", role, str(config), "--set", f"{role}.base_port={port}")
            process = stack.enter_context(started(log, *words))
            begun.append((f"http://127.0.0.1:{port}", process, log))
        for url, process, log in begun:
            _await(url, process, log, deadline)
        yield Pair(dict(zip(ROLES, (url for url, _, _ in begun), strict=True)))


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
