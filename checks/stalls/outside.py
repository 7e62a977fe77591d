"""Holds the fakes around a run, in processes of their own, and tells them to stall and to go on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp

from checks.stalls.cases import Behaviour, Stall
from megatron_opd.wire.keys import RANK_VARIABLE, RunKeys

END_S = 120.0


@dataclass
class Outside:
    """Holds the fakes around the run. head: the learner's process."""

    students: list[str]
    teacher: str
    head: subprocess.Popen[bytes]

    async def stall(self, stall: Stall) -> None:
        """Let the teacher, or else the learner, stall."""
        await self._behave(stall.teacher)
        if stall.teacher == "serve":
            self._tell("stall")

    async def go_on(self) -> None:
        """Let everybody work again."""
        await self._behave("serve")
        self._tell("go on")

    async def _behave(self, behaviour: Behaviour) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.teacher}/behave", json={"behaviour": behaviour}) as reply,
        ):
            assert reply.status == 200, reply.status

    def _tell(self, line: str) -> None:
        assert self.head.stdin is not None
        self.head.stdin.write(f"{line}\n".encode())
        self.head.stdin.flush()


@contextmanager
def head(address: str, keys: RunKeys) -> Iterator[subprocess.Popen[bytes]]:
    """Run the learner's head."""
    environment = {**os.environ, RANK_VARIABLE: keys.ranks.text()}
    process = subprocess.Popen(
        [sys.executable, "-m", "checks.stalls.head", address],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait(END_S)
